"""train_step against a hand-written FSDP2 loop: the same model, data and optimizer, alternating steps.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.speed.step

Prints, for each setting, the median seconds per step of both, the ratio (median and quartiles over pairs of
neighbouring steps) and the largest difference between their losses.
"""

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_sft as fs
from benchmarks.tables import publish, quartiles, table

HEAD = ["compute", "micro-batches", "train_step s", "hand-written s", "ratio", "quartiles", "loss difference"]


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def make_window(args: argparse.Namespace, step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    window = []
    for _ in range(args.grad_accum_steps):
        ids = torch.randint(args.vocab, (args.batch, args.seq), generator=generator)
        labels = ids.clone()
        labels[:, : int(torch.randint(args.seq // 2, (), generator=generator))] = -100
        window.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return window


def hand_written_step(model, window, optimizer) -> float:
    """What a careful person writes from torch's FSDP2 tutorial: one token count, sum loss, one clip."""
    count = torch.tensor([sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)])
    dist.all_reduce(count)
    scale = dist.get_world_size() / int(count)
    total = torch.zeros(())
    for batch in window:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1),
            batch["labels"][:, 1:].flatten(),
            ignore_index=-100,
            reduction="sum",
        )
        (loss * scale).backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total) / int(count)


def compare(args: argparse.Namespace, param_dtype: torch.dtype) -> str:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    ours = make_model(args)
    theirs = copy.deepcopy(ours)
    mesh = fs.build_mesh(device_type="cpu")
    fs.shard_model(ours, mesh=mesh, mp_policy=policy)
    for layer in theirs.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    optimizers = {id(m): torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (ours, theirs)}
    seconds: dict[str, list[float]] = {"ours": [], "hand-written": []}
    difference = 0.0
    for step in range(args.steps + 2):
        window = make_window(args, step)
        losses = {}
        order = ["ours", "hand-written"] if step % 2 else ["hand-written", "ours"]
        for name in order:
            model = ours if name == "ours" else theirs
            dist.barrier()
            start = time.perf_counter()
            if name == "ours":
                losses[name] = fs.train_step(model, window, optimizers[id(model)]).loss
            else:
                losses[name] = hand_written_step(model, window, optimizers[id(model)])
            dist.barrier()
            if step >= 2:  # the first two steps allocate
                seconds[name].append(time.perf_counter() - start)
        difference = max(difference, abs(losses["ours"] - losses["hand-written"]))
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["hand-written"], strict=True)]
    return [
        str(param_dtype).removeprefix("torch."),
        args.grad_accum_steps,
        *(f"{statistics.median(seconds[way]):.2f}" for way in ("ours", "hand-written")),
        f"{statistics.median(ratios):.3f}",
        quartiles(ratios, 3),
        f"{difference:.1e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("hidden", 512), ("layers", 8), ("vocab", 8000), ("batch", 2), ("seq", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--grad-accum-steps", type=int, default=2)
    parser.add_argument("--steps", type=int, default=11, help="timed steps of each")
    parser.add_argument("--output", type=Path, help="also write the table there")
    args = parser.parse_args()
    context = fs.init_distributed(device_type="cpu")
    torch.set_num_threads(1)
    parameters = sum(p.numel() for p in make_model(args).parameters())
    lines = [
        f"Llama of {parameters / 1e6:.0f}M parameters, {context.world_size} gloo ranks with one thread each, "
        f"{args.steps} alternating steps, {args.batch} x {args.seq} tokens a micro-batch, "
        f"torch {torch.__version__}",
        "",
    ]
    rows = [compare(args, dtype) for dtype in (torch.float32, torch.bfloat16)]
    if context.is_main:
        publish("train_step against a hand-written loop", [*lines, *table(HEAD, rows)], args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
