"""What ``fsdp-sft check`` has measured, in place of data sheets and of shares fitted to published runs."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_sft._process.codec import loads
from fsdp_sft._process.gpus import GB, Gpu, known_device
from fsdp_sft.planner.rates import RATES, Rates
from fsdp_sft.planner.setup import Setup

FORMAT = "fsdp-sft check 1"
_MOST_BYTES = 1 << 26
_TERA = 1e12


@dataclass(frozen=True)
class Measured:
    """The rates of one kind of device and of its links; None for what was not seen.

    Attributes:
        device: Name of the device in torch, or ``"cpu"``.
        num_ranks: Number of ranks that measured.
        ranks_per_node: The most of them on one node.
        healthy: Whether nothing was wrong.
        flops: FLOP/s of products in 16 bits, of the slowest rank.
        wide_flops: The same in float32.
        attention_flops: FLOP/s of attention.
        is_attention_wide: Whether that was in float32.
        operation: Seconds of the smallest operation.
        memory: Bytes per second of the device's memory.
        host_link: Bytes per second between device and host, all devices of a node at once.
        node_link: Bytes per second and rank of a gather within a node.
        network: The same between nodes, over all ranks of a node together.
        contention: Seconds by which a second of gathers slows the products beside it.
        read: Bytes per second at which all ranks together read the run's folder.
        write: The same of writing.
    """

    device: str
    num_ranks: int
    ranks_per_node: int
    healthy: bool
    flops: float | None = None
    wide_flops: float | None = None
    attention_flops: float | None = None
    is_attention_wide: bool = False
    operation: float | None = None
    memory: float | None = None
    host_link: float | None = None
    node_link: float | None = None
    network: float | None = None
    contention: float | None = None
    read: float | None = None
    write: float | None = None

    @classmethod
    def read_file(cls, path: str | os.PathLike[str]) -> "Measured":
        """What a ``check.json`` says.

        Raises:
            ValueError: If it is not one.
        """
        file = Path(path).expanduser()
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{file} is larger than anything that fsdp-sft check writes")
        found = loads(file.read_bytes(), str(file))
        return _parsed(found, str(file))

    @property
    def gpu_name(self) -> str | None:
        """Name by which the planner knows the device; None if it does not."""
        known = known_device(self.device)
        return "cpu" if self.device == "cpu" else None if known is None else known.name

    def applied(self, setup: Setup) -> Setup:
        """The setup with the measured rates, and with the data sheet's for what was not seen.

        Raises:
            ValueError: If another kind of device was measured than is planned for.
        """
        if self.gpu_name is not None:
            self._refuse_another(setup.device)
        return replace(setup, device=self._device(setup.device), rates=self._rates(setup.device))

    def _refuse_another(self, gpu: Gpu) -> None:
        described = gpu.device == "(?!)" and gpu.name != "cpu"  # by the caller, who knows what it is
        if gpu.name != self.gpu_name and not described:
            raise ValueError(f"the file was measured on {self.device}, and the plan is for gpu={gpu.name!r}")

    def _device(self, gpu: Gpu) -> Gpu:
        # The share of the links' rate counts within nodes and between them. It is 1 once either is measured,
        # so the other one's is taken into its rate.
        rest = RATES.network if self.node_link or self.network else 1.0
        between = self.network / self.ranks_per_node if self.network else gpu.bytes_per_second * rest
        return replace(
            gpu,
            flops_per_second=self.flops or gpu.flops_per_second,
            achievable=1.0 if self.flops else gpu.achievable,
            memory_bytes_per_second=self.memory or gpu.memory_bytes_per_second,
            host_bytes_per_second=self.host_link or gpu.host_bytes_per_second,
            node_bytes_per_second=self.node_link or gpu.node_bytes_per_second * rest,
            bytes_per_second=between,
            gpus_per_node=self.ranks_per_node if self.num_ranks > self.ranks_per_node else gpu.gpus_per_node,
        )

    def _rates(self, gpu: Gpu) -> Rates:
        flops = self.flops or gpu.flops_per_second * gpu.achievable * RATES.products
        wide = self.wide_flops / flops if self.wide_flops else RATES.wide
        base = flops * wide if self.is_attention_wide else flops
        products = 1.0 if self.flops else RATES.products
        return Rates(
            products=products,
            attention=self.attention_flops / base * products if self.attention_flops else RATES.attention,
            memory=1.0 if self.memory else RATES.memory,
            network=1.0 if self.node_link or self.network else RATES.network,
            contention=RATES.contention if self.contention is None else self.contention,
            operation=self.operation or RATES.operation,
            host_link=1.0 if self.host_link else RATES.host_link,
            wide=wide,
            sources=tuple(self._sources(gpu)),
        )

    def _sources(self, gpu: Gpu) -> list[str]:
        """Each constant and where it comes from."""
        by = f"measured on {self.num_ranks} ranks"
        sheet = "data sheet and published runs"
        products = gpu.flops_per_second * gpu.achievable * RATES.products
        rows: list[tuple[str, float | None, float, float, str]] = [
            ("products in 16 bits", self.flops, products, _TERA, "TFLOP/s"),
            ("products in float32", self.wide_flops, products * RATES.wide, _TERA, "TFLOP/s"),
            ("attention", self.attention_flops, 0.0, _TERA, "TFLOP/s"),
            ("memory", self.memory, gpu.memory_bytes_per_second * RATES.memory, GB, "GB/s"),
            ("host link", self.host_link, gpu.host_bytes_per_second * RATES.host_link, GB, "GB/s"),
            ("link within a node", self.node_link, gpu.node_bytes_per_second * RATES.network, GB, "GB/s"),
            ("network of a node", self.network, gpu.bytes_per_second * RATES.network, GB, "GB/s"),
            ("contention", self.contention, RATES.contention, 1.0, "s a second"),
        ]
        lines = [
            f"{name} {(found if found is not None else otherwise) / unit:.3g} {said}, "
            f"{by if found is not None else sheet}"
            for name, found, otherwise, unit, said in rows
            if found is not None or otherwise
        ]
        return lines if self.healthy else ["the check found something wrong: see its table", *lines]


def measured_from(given: "Measured | str | os.PathLike[str] | Mapping[str, Any] | None") -> Measured | None:
    """The argument ``measured`` of ``plan_run``: a path to a ``check.json``, or what it holds.

    Raises:
        ValueError: If it is not what ``fsdp-sft check`` writes.
        TypeError: If it is something else.
    """
    if given is None or isinstance(given, Measured):
        return given
    if isinstance(given, Mapping):
        return _parsed(given, "measured")
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"measured must be the path of a check.json, got {type(given).__name__}")
    return Measured.read_file(given)


def _parsed(found: Any, what: str) -> Measured:
    if not isinstance(found, Mapping) or found.get("format") != FORMAT:
        raise ValueError(f"{what} is not what fsdp-sft check writes ({FORMAT!r}): run it again")
    try:
        return _made_of(found)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what} lacks what fsdp-sft check writes: {error}") from error


def _made_of(found: Mapping[str, Any]) -> Measured:
    checks = found["checks"]

    def of(check: str) -> dict[str, Any]:
        values = checks.get(check, {}).get("measured", {})
        if not isinstance(values, dict):
            raise TypeError(f"{check} is no object")
        return values

    products, attention, folder = of("products"), of("attention"), of("folder")
    axes = of("network").get("axes", {})
    hosts = found["hosts"]
    if not isinstance(hosts, list):
        raise TypeError("hosts is no list")
    ranks = found["world_size"]
    if not isinstance(ranks, int) or ranks != len(hosts) or ranks < 1:
        raise TypeError(f"it is of {ranks} ranks, and has hosts of {len(hosts)}")
    device = str(found["device"])
    return Measured(
        device=device,
        num_ranks=ranks,
        ranks_per_node=max(hosts.count(host) for host in hosts),
        healthy=bool(found["healthy"]),
        flops=_rate(products, "flops_per_second"),
        wide_flops=_rate(products, "float32_flops_per_second"),
        attention_flops=_rate(attention, "flops_per_second"),
        is_attention_wide=attention.get("dtype") == "float32",
        operation=_rate(attention, "operation_seconds"),
        memory=_rate(of("memory"), "bytes_per_second"),
        host_link=_rate(of("host link"), "bytes_per_second"),
        node_link=_link(axes, "node"),
        network=_link(axes, "nodes"),
        contention=_rate(of("contention"), "share", least=0.0),
        read=_rate(folder, "read_bytes_per_second"),
        write=_rate(folder, "write_bytes_per_second"),
    )


def _rate(values: Mapping[str, Any], name: str, least: float = 1e-12) -> float | None:
    """A number that a check has measured; None if it has not."""
    found = values.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not least <= found < math.inf:
        raise TypeError(f"{name} must be a positive number, got {found!r}")
    return float(found)


def _link(axes: Mapping[str, Any], spans: str) -> float | None:
    """The rate of a large gather along the axes that lie within a node, or that span nodes."""
    rates = [
        max(_rate(one["bytes_per_second"]["all_gather"], size) or 0.0 for size in sizes)
        for one in axes.values()
        if one["spans"] == spans and (sizes := list(one["bytes_per_second"]["all_gather"]))
    ]
    return min(rates) if rates and min(rates) > 0 else None
