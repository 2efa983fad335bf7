"""What has been tried, and the table made of it."""

import time
from collections import Counter
from typing import Any

from tests.programs.judge import judge
from tests.programs.writing import drawn


def tried(seed: int) -> dict[str, Any]:
    program, start = drawn(seed), time.monotonic()
    outcome = judge(program)
    return {
        "seed": seed,
        "odd": "" if program.odd is None else program.odd[1],
        **vars(outcome),
        "seconds": round(time.monotonic() - start, 1),
    }


def table(entries: list[dict[str, Any]]) -> str:
    kinds = Counter(entry["kind"] for entry in entries)
    steps = sum(entry["steps"] for entry in entries if not entry["odd"])
    refused = sum(entry["refused"] for entry in entries if not entry["odd"])
    odd = [entry for entry in entries if entry["odd"]]
    return (
        f"{len(entries)} programs: {kinds['right']} right, {kinds['fault']} faults\n"
        f"{steps} steps, of which {refused} were refused as they had to be\n"
        f"{len(odd)} with a rank that differs, refused on all ranks: "
        f"{sum(entry['kind'] == 'right' for entry in odd)}"
    )
