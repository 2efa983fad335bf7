"""Whether gloo, which carries control messages and checkpoints, talks over an interface that others reach."""

import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_sft._ranks.agree import through_rank_0
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
    """The interface and address that gloo takes on this rank, and speeds in Mbit/s by interface."""
    asked = next(iter(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))), None)
    addresses = _addresses()
    # Without the variable gloo listens where the host's own name leads.
    address = addresses.get(asked) if asked is not None else _address_of_name()
    name = asked or next((name for name, one in addresses.items() if one == address), None)
    return {"name": name, "address": address, "asked": asked, "speeds": _speeds()}


def _troubles(cluster: Cluster, everyone: list[dict[str, Any]]) -> Iterator[Trouble]:
    names = Counter(one["name"] for one in everyone)
    usual = max(names, key=lambda name: (names[name], name == everyone[0]["name"]))
    for rank, one in enumerate(everyone):
        is_loopback = one["name"] == "lo" or str(one["address"] or "").startswith("127.")
        if is_loopback and cluster.num_hosts > 1:
            reason = (
                f"GLOO_SOCKET_IFNAME={one['asked']}"
                if one["asked"]
                else "the host's name leads there (/etc/hosts)"
            )
            yield Trouble(
                "fail",
                (rank,),
                f"gloo talks over the loopback, which other nodes do not reach: {reason}; set "
                "GLOO_SOCKET_IFNAME to the interface of the cluster's network",
            )
        elif one["name"] != usual:
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


def _address_of_name() -> str | None:
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0])
    except OSError:
        return None


def _addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    for _, name in socket.if_nameindex():
        address = _address(name)
        if address is not None:
            found[name] = address
    return found


def _address(name: str) -> str | None:
    """The address of an interface by SIOCGIFADDR of netdevice(7); None without one, or elsewhere."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            reply = fcntl.ioctl(asking.fileno(), 0x8915, name.encode()[:15].ljust(256, b"\0"))
    except (ImportError, OSError):
        return None
    return socket.inet_ntoa(reply[20:24])


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


CHECK = Check("interface", "does gloo talk over an interface that the other nodes reach?", 50, 1, _run)
