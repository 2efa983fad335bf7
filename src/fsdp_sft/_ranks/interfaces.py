"""The network interfaces of this host, and the one over which gloo reaches other ranks."""

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class GlooAddress:
    """Where gloo listens for other ranks.

    Attributes:
        host: Name of this host.
        network: Says which processes share this host's loopback: the same text for those, and for no others.
        interface: Name of the interface; None if it cannot be told.
        address: Its address.
        asked: Name that ``GLOO_SOCKET_IFNAME`` gives; None without.
        interfaces: Names of all interfaces.
    """

    host: str
    network: str
    interface: str | None
    address: str | None
    asked: str | None
    interfaces: tuple[str, ...]

    @property
    def is_there(self) -> bool:
        """Whether the host has the interface that was asked for."""
        return self.asked is None or self.asked in self.interfaces

    @property
    def reason(self) -> str:
        """Why gloo listens there."""
        if self.asked:
            return f"GLOO_SOCKET_IFNAME={self.asked}"
        return "where the host's name leads, see /etc/hosts"


def gloo_address() -> GlooAddress:
    """Where gloo listens on this host: at the first of ``GLOO_SOCKET_IFNAME``, else where the name leads."""
    host = socket.gethostname()
    asked = next(iter(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))), None)
    known = _addresses()
    address = known.get(asked) if asked is not None else _address_of(host)
    name = asked or next((name for name, one in known.items() if one == address), None)
    names = tuple(name for _, name in socket.if_nameindex())
    return GlooAddress(host, _network(host), name, address, asked, names)


@functools.cache
def _network(host: str) -> str:
    """The running system and its network namespace: hosts may have equal names, containers other ones."""
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.stat().st_ino}"
    except OSError:  # not Linux
        return host


def _address_of(host: str) -> str:
    """The first address that a host's name leads to and that is the host's own; without one the loopback.

    So does ``createDefaultDevice`` of torch's GlooDeviceFactory.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as listening:
                listening.bind(address)
        except OSError:
            continue
        return str(address[0])
    return "127.0.0.1"


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
