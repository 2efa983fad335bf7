"""Whether the variables that change a run are the same on all ranks."""

from collections.abc import Iterator
from typing import Any

from fsdp_sft._ranks.agree import through_rank_0
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.environment import comparable, minorities, said, variables
from fsdp_sft.check.mechanism import Check, Outcome, Trouble

_MANY = 4  # values beside the usual one that are not listed


def _run(cluster: Cluster) -> Outcome:
    def own() -> dict[str, str]:
        return {name: comparable(name, value) for name, value in variables().items()}

    def decide(everyone: list[dict[str, str]]) -> Outcome:
        return Outcome(f"{len(everyone[0])} that matter, compared", tuple(_troubles(everyone)))

    found: Outcome = through_rank_0("comparing variables", own, decide)
    return found


def _troubles(everyone: list[Any]) -> Iterator[Trouble]:
    for name, (usual, others) in minorities(everyone).items():
        if len(others) >= _MANY:
            ranks = sorted(rank for some in others.values() for rank in some)
            text = f"{name} has {len(others) + 1} values: if not on purpose, set it in the job's script"
            yield Trouble("warn", tuple(ranks), text)
            continue
        for value, ranks in others.items():
            here, there = _shown(name, value), _shown(name, usual)
            yield Trouble(
                "fail",
                tuple(ranks),
                f"{here}, and {there} elsewhere: set it in the job's script, so that all ranks get the same",
            )


def _shown(name: str, value: str | None) -> str:
    return f"{name} is not set" if value is None else f"{name}={said(value)}"


CHECK = Check("variables", "are the variables that change a run the same on all ranks?", 20, 1, _run)
