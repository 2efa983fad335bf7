"""Whether all ranks have the same versions, driver and kind of device."""

from collections.abc import Iterator
from typing import Any

from fsdp_sft._ranks.agree import through_rank_0
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.environment import minorities, versions
from fsdp_sft.check.mechanism import Check, Outcome, Trouble
from fsdp_sft.check.nvml import driver_version


def _run(cluster: Cluster) -> Outcome:
    def own() -> dict[str, str]:
        driver = driver_version() if cluster.device.type == "cuda" else None
        return {**versions(cluster.device), **({"driver": driver} if driver else {})}

    def decide(everyone: list[dict[str, str]]) -> Outcome:
        known = everyone[0]
        said = f"torch {known['torch']}, transformers {known['transformers']}, {known['device']}"
        return Outcome(said, tuple(_troubles(everyone)), measured={"versions": known})

    found: Outcome = through_rank_0("comparing versions", own, decide)
    return found


def _troubles(everyone: list[Any]) -> Iterator[Trouble]:
    for name, (usual, others) in minorities(everyone).items():
        for value, ranks in others.items():
            # Another kind of device is seldom an accident of a node that can be left out: still, all ranks
            # wait for the slowest, and memory is planned for one kind.
            yield Trouble(
                "fail",
                tuple(ranks),
                f"{name} {value}, and {usual} elsewhere: give all nodes the same environment or image",
                leave_out=name in ("device", "driver"),
            )


CHECK = Check("versions", "do all ranks have the same versions and devices?", 10, 1, _run)
