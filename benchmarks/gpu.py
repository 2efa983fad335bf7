"""Tokens per second, MFU and peak memory of train_step on GPUs, over checkpointing and compilation.

    torchrun --standalone --nproc-per-node GPUS benchmarks/gpu.py --output benchmarks/results/gpu.md

The model is a Qwen2.5 of the size asked for, with random weights.
"""

import argparse
import gc
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

import fsdp_sft as fs

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
    "7b": dict(zip(_FIELDS, (3584, 18944, 28, 28, 4, 152064, False), strict=True)),
}


def measure(args: argparse.Namespace, context: fs.DistributedContext, ratio: str, compiled: bool) -> str:
    config = Qwen2Config(**SIZES[args.size])
    with torch.device(context.device):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16).train()
    fs.apply_sac(model, ratio)
    if compiled:
        fs.compile_blocks(model)
    fs.shard_model(model, mesh=fs.build_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    flops = fs.model_flops_per_token(config, args.seq)
    ids = torch.randint(config.vocab_size, (args.batch, args.seq))
    window = [{"input_ids": ids, "labels": ids}] * args.grad_accum_steps
    fs.reset_peak_memory()
    seconds = []
    for step in range(args.steps + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = fs.train_step(model, window, optimizer)
        torch.cuda.synchronize()
        if step >= 3:
            seconds.append(time.perf_counter() - start)
    middle = statistics.median(seconds)
    per_gpu = result.num_tokens / context.world_size / middle
    peak = fs.peak_flops_per_second()
    mfu = f"{per_gpu * flops / peak:.1%}" if peak else "unknown device"
    memory = fs.memory_stats()["peak_allocated_bytes"] / 2**30
    spread = f"{middle:.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
    return f"| {ratio} | {'yes' if compiled else 'no'} | {spread} | {per_gpu:,.0f} | {mfu} | {memory:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    for name, default in (("batch", 2), ("seq", 4096), ("grad-accum-steps", 2), ("steps", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, help="also write the table there")
    args = parser.parse_args()
    context = fs.init_distributed(device_type="cuda")
    lines = [
        f"Qwen2.5-{args.size} shapes, {context.world_size} x {torch.cuda.get_device_name()}, "
        f"{args.grad_accum_steps} micro-batches of {args.batch} x {args.seq} tokens a rank, "
        f"float32 masters, bfloat16 compute, AdamW fused, torch {torch.__version__}",
        "",
        "| sac ratio | compiled | seconds a step (min to max) | tokens/s per GPU | MFU | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    for ratio in ("0", "1/3", "1"):
        for compiled in (False, True):
            lines.append(measure(args, context, ratio, compiled))
            gc.collect()
            torch.cuda.empty_cache()
    if context.is_main:
        print("\n".join(lines))
        if args.output:
            args.output.write_text("# train_step on GPUs\n\n" + "\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
