"""What ``fsdp-sft check`` takes: seconds, messages and bytes of each rank; and how often it is right.

    python -m benchmarks.checks.check_cost --output check-cost.md

gloo ranks on this machine, which share its processors. What a rank sends is asked of the kernel
(``control_plane``): segments with data, and their bytes, of which the links' own measurement is most.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import fsdp_sft as fs
from benchmarks.checks.control_plane import sent
from benchmarks.tables import publish, table


def as_rank(words: list[str]) -> int:
    """Run the checks as one of torchrun's ranks; rank 0 writes what all have sent."""
    from fsdp_sft.check.command import check
    from fsdp_sft.commands.options import add_check

    parser = argparse.ArgumentParser()
    add_check(parser)
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    fs.init_distributed(device_type="cpu")
    before, started = sent(), time.perf_counter()
    code = check(arguments)
    seconds, after = time.perf_counter() - started, sent()
    everyone: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(everyone, (after[0] - before[0], after[1] - before[1]))
    if dist.get_rank() == 0:
        found = {"seconds": seconds, "code": code, "sent": everyone}
        Path(os.environ["CHECK_COST"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def run(ranks: int, folder: Path, only: list[str] | None) -> dict[str, object]:
    """One run of the command on as many ranks."""
    out = folder / "cost.json"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words += ["-m", "benchmarks.checks.check_cost", "--as-rank", "--json", str(folder / "check.json")]
    words += ["--root", str(folder / "root"), *(["--only", *only] if only else [])]
    environment = {**os.environ, "CHECK_COST": str(out), "OMP_NUM_THREADS": "1"}
    subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: dict[str, object] = json.loads(out.read_text())
    return found


def row(ranks: int, found: Sequence[dict[str, object]]) -> list[str]:
    """The cells of one number of ranks."""
    sent_by: list[list[int]] = found[0]["sent"]  # type: ignore[assignment]
    messages, sizes = [one for one, _ in sent_by], [size for _, size in sent_by]
    seconds = [float(str(one["seconds"])) for one in found]
    healthy = sum(one["code"] == 0 for one in found)
    return [
        str(ranks),
        f"{healthy} of {len(found)}",
        f"{statistics.median(seconds):.0f}",
        f"{statistics.mean(messages):,.0f} ({max(messages):,})",
        f"{statistics.mean(sizes) / 2**20:,.0f} ({max(sizes) / 2**20:,.0f})",
    ]


def main() -> None:
    if "--as-rank" in sys.argv:
        sys.exit(as_rank([word for word in sys.argv[1:] if word != "--as-rank"]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 24])
    parser.add_argument("--times", type=int, default=1, help="runs of each size but the largest")
    parser.add_argument("--only", nargs="+", help="of the checks, these alone")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for ranks in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            times = options.times if ranks != max(options.sizes) else 1
            rows.append(row(ranks, [run(ranks, Path(folder), options.only) for _ in range(times)]))
    head = (
        "ranks",
        "healthy",
        "seconds",
        "messages of a rank: mean (busiest)",
        "MiB of a rank: mean (busiest)",
    )
    lines = [
        f"gloo ranks on {os.cpu_count()} processors, all checks, torch {torch.__version__}; seconds without "
        "the start of the processes.",
        "",
        *table(head, rows),
        "",
    ]
    publish("What `fsdp-sft check` takes", lines, options.output)


if __name__ == "__main__":
    sys.exit(main())
