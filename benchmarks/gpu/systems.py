"""One system's training steps on one model, in processes of their own; started by gpu.py.

    python -m benchmarks.gpu.systems case.json

Prints ``REPORT`` and JSON from rank 0: seconds of each step, of the slowest rank, and peak memory, of the
fullest one, both after the warm-up.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

import fsdp_sft as fs

LEARNING_RATE = 1e-5


class Meter:
    """Seconds from the end of one step to that of the next, so that what lies between steps counts too."""

    def __init__(self, case: dict) -> None:
        self.case, self.graphs = case, 0
        self.ends: list[float] = []
        self.losses: list[float] = []

    def stepped(self, loss: float | None = None) -> None:
        """A step has ended; the first call is the start of the first step."""
        if not self.ends and self.case["device"] == "cuda":
            torch.cuda.empty_cache()  # what building the model left is no part of the steps' reserved memory
        synchronize()
        self.ends.append(time.perf_counter())
        if loss is not None:
            self.losses.append(loss)
        if len(self.ends) - 1 == self.case["warmup"]:
            fs.reset_peak_memory(self.case["device"])
            self.graphs = compiled_graphs()

    def report(self, how: str, mean_loss: float | None = None) -> None:
        """Print what all ranks have measured."""
        seconds = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
        own = {"seconds": seconds[self.case["warmup"] :], "memory": fs.memory_stats(self.case["device"])}
        ranks = [own]
        if dist.is_initialized():
            ranks = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(ranks, own)
        steps = [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
        memory = {name: max(rank["memory"][name] for rank in ranks) for name in own["memory"]}
        loss = statistics.mean(self.losses) if mean_loss is None else mean_loss
        if int(os.environ.get("RANK", "0")) == 0:
            found = {"seconds": steps, "memory": memory, "loss": loss, "how": how}
            found["graphs"] = {"warmup": self.graphs, "all": compiled_graphs()}  # more: steps that compiled
            print("REPORT " + json.dumps(found), flush=True)


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def build_model(case: dict, device: torch.device) -> Any:
    """Float32 with random weights, the same on all ranks."""
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(Qwen2Config(**case["config"], use_cache=False)).train()


def own_windows(case: dict, rank: int) -> list[list[dict[str, torch.Tensor]]]:
    """This rank's batches of each optimizer step: packs of equal length, joined to micro-batches."""
    packs, micro = torch.load(case["packs"])[rank], case["micro_batch"]
    total = len(packs["input_ids"])
    batches = [
        {name: column[start : start + micro] for name, column in packs.items()}
        for start in range(0, total, micro)
    ]
    count = case["packs_per_step"] // micro
    return [batches[start : start + count] for start in range(0, len(batches), count)]


def run_fsdp_sft(case: dict) -> None:
    context = fs.init_distributed(device_type=case["device"])
    plan = case["plan"]
    model = build_model(case, context.device).to(torch.bfloat16)
    fs.apply_sac(model, plan["sac_ratio"], placement=plan["sac_placement"])
    if case["attention"] == "varlen":
        fs.use_varlen_attention(model)
    fs.compile_blocks(model, backend=case["backend"])
    mesh = fs.build_mesh(device_type=case["device"])
    fs.shard_model(model, mesh=mesh, reshard_after_forward=plan["reshard_after_forward"])
    how = f"{fs.prepare_loss(model)} loss"
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    meter = Meter(case)
    meter.stepped()
    for window in own_windows(case, context.rank):
        result = fs.train_step(model, window, optimizer, max_grad_norm=1.0)
        meter.stepped(result.loss)
    meter.report(how)


def run_loop(case: dict) -> None:
    """What FSDP2's and transformers' own documentation add up to, written out."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kind = case["device"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (world,))
    model = build_model(case, device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        block.compile(backend=case["backend"])
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    meter = Meter(case)
    meter.stepped()
    for window in own_windows(case, rank):
        total = torch.zeros((), device=device)
        for batch in window:
            on_device = {name: column.to(device, non_blocking=True) for name, column in batch.items()}
            loss = model(**on_device).loss / len(window)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        meter.stepped(total.item() / world)
    meter.report("full logits")


def run_trainer(case: dict) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    sharded = case["system"] == "trainer_fsdp"
    rank_windows = [own_windows(case, rank) for rank in range(case["gpus"])]
    # accelerate hands batch i to rank i modulo their number.
    batches = [
        batch
        for windows in zip(*rank_windows, strict=True)
        for same_turn in zip(*windows, strict=True)
        for batch in same_turn
    ]
    options: dict[str, Any] = {
        "bf16": True,
        "max_steps": len(rank_windows[0]),
        "per_device_train_batch_size": 1,  # of ready batches
        "gradient_accumulation_steps": len(rank_windows[0][0]),
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,  # of torch's AdamW, as in the other systems
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "train_sampling_strategy": "sequential",
        "torch_compile": True,
        "torch_compile_backend": case["backend"],
        "remove_unused_columns": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": case["device"] == "cpu",
    }
    if sharded:
        options["fsdp"] = True
        options["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": True,
            "activation_checkpointing": True,
        }
    else:
        options["gradient_checkpointing"] = True
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    meter = Meter(case)

    class Steps(TrainerCallback):
        def on_train_begin(self, *_args, **_kwargs):
            meter.stepped()

        def on_step_end(self, *_args, **_kwargs):
            meter.stepped()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, **options)
        trainer = Trainer(
            build_model(case, arguments.device),
            arguments,
            train_dataset=batches,
            data_collator=lambda ready: ready[0],
            callbacks=[Steps()],
        )
        trained = trainer.train()
    from torch.distributed.fsdp import FSDPModule

    found = any(isinstance(module, FSDPModule) for module in trainer.model_wrapped.modules())
    assert found == sharded, f"the model is a {type(trainer.model_wrapped).__name__}"
    how = "FSDP2" if sharded else "no FSDP, autocast"
    meter.report(f"full logits, {how}", trained.training_loss)


SYSTEMS = {
    "fsdp_sft": run_fsdp_sft,
    "loop": run_loop,
    "trainer": run_trainer,
    "trainer_fsdp": run_trainer,
}


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    if case["device"] == "cpu":
        torch.set_num_threads(1)
    SYSTEMS[case["system"]](case)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
