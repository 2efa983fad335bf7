"""Cast each shard after sharding, or each block before it: seconds and peak anonymous memory.

    python -m benchmarks.speed.shard

A materialised bfloat16 model gets float32 master shards both ways: on 2 real gloo ranks, and as rank 0 of
64 with a fake process group. Every measurement is a fresh process; the two ways alternate. Memory is the
growth of RssAnon over the materialised model, sampled every 2 ms.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.host_memory import PeakMemory, anonymous_bytes
from benchmarks.tables import median_and_range, publish, table

WAYS = ("after", "before")
HEAD = ["ranks", "cast", "seconds (min to max)", "peak over the model, MiB", "at the end, MiB"]


def make_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    return model


def cast_before(model, mesh) -> None:
    """The published recipe: each block is cast as a whole, then split."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer.float(), mesh=mesh, mp_policy=policy)
    fully_shard(model.float(), mesh=mesh, mp_policy=policy)


def worker(way: str, ranks: int) -> None:
    import fsdp_sft as fs

    torch.set_num_threads(1)
    if ranks == 2:
        fs.init_distributed(device_type="cpu")
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = fs.build_mesh(device_type="cpu")
    model = make_model()
    parameters = sum(p.numel() for p in model.parameters())
    before = anonymous_bytes()
    with PeakMemory() as memory:
        start = time.perf_counter()
        if way == "after":
            fs.shard_model(model, mesh=mesh)
        else:
            cast_before(model, mesh)
        seconds = time.perf_counter() - start
    assert all(p.dtype == torch.float32 for p in model.parameters())
    report = {
        "seconds": seconds,
        "peak": memory.grown,
        "end": anonymous_bytes() - before,
        "parameters": parameters,
    }
    if dist.get_rank() == 0:
        print("REPORT " + json.dumps(report), flush=True)
    if ranks == 2:
        dist.barrier()
    dist.destroy_process_group()


def measure(way: str, ranks: int) -> dict[str, float]:
    command = [sys.executable]
    if ranks == 2:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.speed.shard", "--worker", way, "--ranks", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    line = next(line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    return json.loads(line.removeprefix("REPORT "))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the table there")
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.ranks)
        return
    lines, rows = [], []
    for ranks in (2, 64):
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(args.runs):
            for way in WAYS:
                runs[way].append(measure(way, ranks))
        if not lines:
            parameters = runs["after"][0]["parameters"]
            lines = [
                f"{parameters / 1e6:.0f}M parameters, bfloat16 to float32 shards, median of {args.runs} "
                f"alternating fresh processes, one thread each, torch {torch.__version__}",
                "",
            ]
        for way in WAYS:
            seconds = [run["seconds"] for run in runs[way]]
            peak, end = (statistics.median(run[key] for run in runs[way]) / 2**20 for key in ("peak", "end"))
            kind = "2, gloo" if ranks == 2 else "64, simulated"
            name = "each shard, after" if way == "after" else "each block, before"
            rows.append([kind, name, median_and_range(seconds), f"{peak:+.0f}", f"{end:+.0f}"])
    publish("Cast after or before sharding", [*lines, *table(HEAD, rows)], args.output)


if __name__ == "__main__":
    main()
