"""The first load of a process: small layers, nothing warm but the page cache; ways alternating, each fresh.

    python -m benchmarks.speed.cold                                 # 2 ranks, 1.1 GB, hidden 1536
    python -m benchmarks.speed.cold --hidden 4096 --layers 4        # layers of a 7B model
    python -m benchmarks.speed.cold --idle 8                        # memory that the machine's host took back
    python -m benchmarks.speed.cold --one ours                      # one process group, one way

What a training script meets: each process has imported torch and transformers and joined its group, and has
never built a model. A round starts the ranks anew for each of the ways, each with one thread; the time is
the slowest rank's. ``raw`` is the limit that benchmarks.speed.load describes. ``large`` is the share of a
process's own memory that lies in large pages in the end, by the system's count.

Memory is fresh to the process and not to the machine: see ``have_memory_ready``. With ``--idle`` a load
begins some seconds later, when the host of a virtual machine may have taken back what it can.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import fsdp_sft as fs
from benchmarks.speed.load import have_memory_ready, make_checkpoint, native, ours, rank, raw_reader

WAYS = ("raw", "ours", "transformers native")


def one(way: str, folder: Path, idle: float) -> None:
    """Time one way in this process, which must be one rank of a job; rank 0 prints."""
    import transformers
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401  # what both ways import

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    fs.init_distributed(device_type="cpu")
    mesh = fs.build_mesh(device_type="cpu")
    have_memory_ready(folder)
    time.sleep(idle)
    dist.barrier()
    if way == "raw":
        seconds = raw_reader(folder)
    elif way == "ours":
        seconds = ours(folder, mesh, False)
    else:
        seconds = native(folder, mesh)
    worst = torch.tensor([seconds, large_share()])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if rank() == 0:
        print(json.dumps(dict(zip(("seconds", "large"), worst.tolist(), strict=True))))
    dist.destroy_process_group()


def large_share() -> float:
    """Share of this process's anonymous memory that is in large pages."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    sizes = {name: int(size) for name, size, _ in lines}
    return sizes["AnonHugePages:"] / sizes["Anonymous:"]


def run(way: str, folder: Path, ranks: int, idle: float) -> tuple[float, float]:
    """The same in fresh processes; (seconds, share in large pages)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command += ["-m", "benchmarks.speed.cold", "--one", way, "--at", str(folder), "--idle", str(idle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    told = json.loads(done.stdout.splitlines()[-1])
    return told["seconds"], told["large"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--idle", type=float, default=0, help="seconds")
    parser.add_argument("--one", choices=WAYS)
    parser.add_argument("--at", type=Path, help="an existing checkpoint")
    options = parser.parse_args()
    if options.one:
        one(options.one, options.at, options.idle)
        return
    folder = Path(tempfile.gettempdir()) / "fsdp-sft-bench" / f"{options.hidden}-{options.layers}"
    if not (folder / "config.json").exists():
        make_checkpoint(folder, hidden=options.hidden, layers=options.layers)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    shares: dict[str, list[float]] = {way: [] for way in WAYS}
    started = time.perf_counter()
    for _ in range(options.rounds):
        for way in WAYS:
            seconds, share = run(way, folder, options.ranks, options.idle)
            times[way].append(seconds)
            shares[way].append(share)
    print(f"{total / 1e9:.2f} GB of bf16, {options.ranks} ranks, {options.rounds} rounds of fresh processes")
    print(f"{'':20s} median s   best   x raw   x ours   large")
    for way, taken in times.items():
        ratios = [
            statistics.median(a / b for a, b in zip(taken, times[other], strict=True))
            for other in ("raw", "ours")
        ]
        median, best, large = statistics.median(taken), min(taken), statistics.median(shares[way])
        print(f"{way:20s} {median:8.3f} {best:6.3f} {ratios[0]:7.2f} {ratios[1]:8.2f} {large:7.0%}")
    print(f"({time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main()
