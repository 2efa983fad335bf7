"""The planner's estimate against what training steps really take on a GPU.

    python -m benchmarks.gpu.memory --gpu h200 --output gpu_memory.md

Each configuration is a fresh process: a model of a published size with random weights, sharded over this one
GPU, three steps, then `max_memory_allocated` and `max_memory_reserved` of the third.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.tables import publish, table

_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
SIZES = {  # https://huggingface.co/Qwen: the config.json of each Qwen2.5
    "0.5b": dict(zip(_FIELDS, (896, 4864, 24, 14, 2, 151936, True), strict=True)),
    "1.5b": dict(zip(_FIELDS, (1536, 8960, 28, 12, 2, 151936, True), strict=True)),
    "3b": dict(zip(_FIELDS, (2048, 11008, 36, 16, 2, 151936, True), strict=True)),
    "7b": dict(zip(_FIELDS, (3584, 18944, 28, 28, 4, 152064, False), strict=True)),
}
# size, micro batch, sequence, ratio, compiled, loss, padded, micro-batches a step; AdamW is foreach, but for
# 7b fused, since foreach's copies of 7b do not fit
CASES = [
    ("0.5b", 4, 4096, "0", False, "chunked", True, 1),
    ("0.5b", 4, 4096, "0", False, "logits", True, 1),
    ("0.5b", 1, 16384, "1/2", False, "chunked", False, 1),
    ("1.5b", 2, 4096, "0", False, "chunked", True, 1),
    ("1.5b", 2, 4096, "1/3", False, "logits", True, 2),
    ("1.5b", 2, 4096, "1/3", True, "chunked", True, 1),
    ("1.5b", 4, 2048, "1", False, "chunked", False, 2),
    ("3b", 1, 8192, "1/2", False, "chunked", True, 1),
    ("3b", 1, 8192, "1/2", True, "chunked", False, 1),
    ("7b", 1, 2048, "1", False, "chunked", True, 1),
    ("7b", 1, 4096, "1", True, "chunked", False, 1),
]
HEAD = ["size", "batch", "micro-batches", "sac", "compiled", "loss", "padded", "measured", "estimated"]
HEAD += ["error", "reserved", "peak in"]


def optimizer_of(case: tuple) -> str:
    return "fused" if case[0] == "7b" else "foreach"


def options_of(case: tuple, gpu: str) -> dict:
    """A case as arguments of `estimate_memory`."""
    import torch

    _, micro, seq, ratio, compiled, loss, padded, steps = case
    return {
        "num_gpus": 1,
        "micro_batch_size": micro,
        "seq_length": seq,
        "sac_ratio": ratio,
        "compile": compiled,
        "loss_impl": loss,
        "logits_dtype": torch.float32,  # as causal_lm_loss computes the loss of logits in full
        "attention_mask": padded,
        "grad_accum_steps": steps,
        "gpu": gpu,
        "optimizer": f"adamw_{optimizer_of(case)}",
    }


def measure(case: tuple) -> None:
    """Run the third step of a case and print its peaks as JSON; in a process of its own."""
    import torch
    import torch.distributed as dist
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import fsdp_sft as fs

    size, micro, seq, ratio, compiled, loss, padded, steps = case
    context = fs.init_distributed(device_type="cuda")
    config = Qwen2Config(**SIZES[size], max_position_embeddings=32768)
    with torch.device(context.device):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16).train()
    fs.apply_sac(model, ratio)
    if compiled:
        fs.compile_blocks(model)
    fs.shard_model(model, mesh=fs.build_mesh())
    fs.prepare_loss(model, impl=loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **{optimizer_of(case): True})
    ids = torch.randint(config.vocab_size, (micro, seq))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][:, -1] = 0
    for step in range(3):
        if step == 2:
            torch.cuda.synchronize()
            fs.reset_peak_memory()
        fs.train_step(model, [batch] * steps, optimizer)
    memory = fs.memory_stats()
    print(json.dumps({key: memory[key] for key in ("peak_allocated_bytes", "peak_reserved_bytes")}))
    dist.destroy_process_group()


def compare(case: tuple, gpu: str) -> list[object]:
    """One row of the table: measured, estimated, error, and what the allocator reserved on top."""
    from transformers import Qwen2Config

    from fsdp_sft import Run, estimate_memory

    size, micro, seq, ratio, compiled, loss, padded, steps = case
    config = Qwen2Config(**SIZES[size], max_position_embeddings=32768)
    found = estimate_memory(config, Run(**options_of(case, gpu)))
    yes = {True: "yes", False: "no"}
    label = [size, f"{micro} x {seq}", steps, ratio, yes[bool(compiled)], loss, yes[bool(padded)]]
    worker = [sys.executable, "-m", "benchmarks.gpu.memory", "--case", json.dumps(case)]
    done = subprocess.run(worker, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1][:80] if done.stderr.strip() else "no message"
        return [*label, reason, f"{found.peak_bytes / 2**30:.2f}", "", "", found.peak_phase]
    measured = json.loads(done.stdout.splitlines()[-1])
    peak, reserved = measured["peak_allocated_bytes"], measured["peak_reserved_bytes"]
    sizes = [f"{size / 2**30:.2f}" for size in (peak, found.peak_bytes)]
    errors = [f"{found.peak_bytes / peak - 1:+.1%}", f"{reserved / peak - 1:+.1%}"]
    return [*label, *sizes, *errors, found.peak_phase]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="h200", help="as estimate_memory takes it")
    parser.add_argument("--output", type=Path, help="also write the table there")
    parser.add_argument("--cases", nargs="+", type=int, help="these of the list, from 0; default: all")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        measure(tuple(json.loads(args.case)))
        return
    import torch

    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device; here there is none")
    lines = [
        f"Qwen2.5 shapes on one {torch.cuda.get_device_name()}, float32 masters, bfloat16 compute, AdamW "
        f"(foreach, of 7b fused), third step, torch {torch.__version__}. GiB of max_memory_allocated; "
        "'reserved' is what the allocator took on top.",
        "",
    ]
    rows = []
    for case in [CASES[index] for index in args.cases or range(len(CASES))]:
        rows.append(compare(case, args.gpu))
        print(*rows[-1], flush=True)  # as they come: a case takes minutes
    publish("The planner's estimate on a GPU", [*lines, *table(HEAD, rows)], args.output)


if __name__ == "__main__":
    main()
