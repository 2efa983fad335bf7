"""Hold the planner against published runs that ran out of memory, or nearly did.

python -m benchmarks.published.near_limit

Each run of near_limit.json has its source, what that says ("said", "quote"), what is assumed where it says
nothing, and the run in the planner's words. Unlike in compare.py, the programs are of any kind: DeepSpeed,
FSDP1, other losses. So the figures say how far an estimate of this library's loop holds for another's.
"""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.published.compare import GIB, config_of, table
from fsdp_sft import Run, estimate_memory
from fsdp_sft._process.gpus import gpu_named
from fsdp_sft.planner.estimate import budget_of

FOUND = json.loads((Path(__file__).parent / "near_limit.json").read_text())
OUTPUT = Path(__file__).parents[1] / "results" / "near-the-limit.md"
HEAD = """\
# The planner beside runs near the limit

`python -m benchmarks.published.near_limit`; what each source says, and what is assumed where it says nothing,
is in benchmarks/published/near_limit.json. Estimates are of this library's loop in the reporter's setting,
and so of a program that none of them ran.
"""


def run_of(options: dict[str, Any]) -> Run:
    """The run in the planner's terms; dtypes stand in the file by their names."""
    typed = {
        key: getattr(torch, value) if key.endswith("_dtype") and value else value
        for key, value in options.items()
    }
    return Run(**typed)


def main() -> None:
    rows, said, right = [], [], {True: [0, 0], False: [0, 0]}
    for row in FOUND["runs"]:
        run = run_of(row["run"])
        peak = estimate_memory(config_of(FOUND["configs"][row["model"]]), run).peak_bytes
        usable = budget_of(gpu_named(row["run"]["gpu"]), run.num_gpus).usable_bytes
        answer = "fits" if peak <= usable else "does not fit"
        fitted, measured = row["fitted"], row["measured_gib"]
        right[fitted][0] += (peak <= usable) == fitted
        right[fitted][1] += 1
        name = f"[{'/'.join(row['source'].split('/')[3:5])}]({row['source']})"
        reported = f"{measured:g} ({peak / GIB / measured - 1:+.0%})" if fitted else "out of memory"
        setup = f"{run.micro_batch_size} x {run.seq_length}, {row['said']['training']}"
        setup += f", {row['said']['sharding']}" if "sharding" in row["said"] else ""
        of = f"{peak / GIB:.1f} of {usable / GIB:.1f}: {answer}"
        rows.append([name, row["model"], row["said"]["gpus"], setup, reported, of])
        said.append(f"- {name}, {row['model']}: {row['difference']}")
    figures = (
        f"Of {right[True][1]} runs that fitted, it says so of {right[True][0]}; of {right[False][1]} that "
        f"ran out of memory, it says so of {right[False][0]}. What the programs hold beyond this loop:"
    )
    head = ["source", "model", "GPUs", "rows and training", "reported, GiB", "estimate, GiB"]
    OUTPUT.write_text("\n".join([HEAD, table(head, rows), "", figures, "", *said, ""]))
    print(OUTPUT)


if __name__ == "__main__":
    main()
