"""Whether gloo, which carries control messages and checkpoints, talks over the interface that it should.

Interfaces that other hosts do not reach are refused when the ranks meet.
"""

import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_sft._ranks.agree import through_rank_0
from fsdp_sft._ranks.interfaces import gloo_address
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.mechanism import Check, Outcome, Trouble

_SYSTEM = Path("/sys/class/net")
_SLOWER = 10  # times that an interface may be slower than the fastest of its host


def _run(cluster: Cluster) -> Outcome:
    def decide(everyone: list[dict[str, Any]]) -> Outcome:
        said = f"gloo over {everyone[0]['name'] or 'an interface that cannot be told'}"
        unseen = "" if everyone[0]["name"] else "the interface (no /sys/class/net)"
        return Outcome(said, tuple(_troubles(cluster, everyone)), unseen=unseen)

    found: Outcome = through_rank_0("looking at the network's interfaces", _own, decide)
    return found


def _own() -> dict[str, Any]:
    """The interface that gloo takes on this rank, and speeds in Mbit/s by interface."""
    return {"name": gloo_address().interface, "speeds": _speeds()}


def _troubles(cluster: Cluster, everyone: list[dict[str, Any]]) -> Iterator[Trouble]:
    names = Counter(one["name"] for one in everyone)
    usual = max(names, key=lambda name: (names[name], name == everyone[0]["name"]))
    for rank, one in enumerate(everyone):
        if one["name"] != usual:
            yield Trouble(
                "warn",
                (rank,),
                f"gloo talks over {one['name']}, and over {usual} elsewhere: see GLOO_SOCKET_IFNAME",
            )
        mine, fastest = one["speeds"].get(one["name"], 0), max(one["speeds"].values(), default=0)
        if cluster.num_hosts > 1 and 0 < mine * _SLOWER <= fastest:
            best = max(one["speeds"], key=lambda name: one["speeds"][name])
            yield Trouble(
                "warn",
                (rank,),
                f"gloo talks over {one['name']} at {mine / 1000:g} Gbit/s, and {best} has {fastest / 1000:g}:"
                " set GLOO_SOCKET_IFNAME",
            )


def _speeds() -> dict[str, int]:
    """Mbit/s of the interfaces that are up and say their speed."""
    found = {}
    for _, name in socket.if_nameindex():
        try:
            if (_SYSTEM / name / "operstate").read_text().strip() == "up":
                found[name] = int((_SYSTEM / name / "speed").read_text())
        except (OSError, ValueError):
            continue
    return found


CHECK = Check("interface", "does gloo talk over the interface that it should?", 50, 1, _run)
