"""What to change when nothing fits, the cheapest change first."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from fsdp_sft._process.gpus import GIB, GPUS
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.planner.budget import Budget, budget_of
from fsdp_sft.planner.estimate import MemoryEstimate, estimate
from fsdp_sft.planner.groups import group_sizes, with_leanest_update
from fsdp_sft.planner.model import build_skeleton
from fsdp_sft.planner.setup import Setup
from fsdp_sft.shard.packing import STORED

_MOST_GPUS = 4096
_SHORTEST = 128  # tokens
_RANK = 16  # of the adapters that are proposed


@dataclass(frozen=True)
class _Way:
    """One change to a training.

    Attributes:
        argument: The keyword of ``Run`` with its value, as code.
        flag: The same as an option of the command line.
        cost: Its cost, in words.
        changes: Fields of the setup that change, with their new values.
    """

    argument: str
    flag: str
    cost: str
    changes: dict[str, Any]


def what_would_fit(
    config: Any, setup: Setup, options: dict[str, Any], budget: Budget, global_batch_size: int
) -> str:
    """Say in several lines what the leanest run needs, and which changes would fit, the cheapest first."""
    smallest = replace(
        with_leanest_update(setup, options),
        micro_batch_size=1,
        sac_ratio=Fraction(1),
        sac_placement="prefix",
        sac_blocks=None,
        reshard_after_forward=True,
        grad_accum_steps=max(1, global_batch_size * setup.cp // setup.num_gpus),
    )
    advisor = _Advisor(config, options, budget)
    least, cp = advisor.leanest(smallest)
    largest = max(least.breakdown, key=lambda part: least.breakdown[part])
    shared = f", {cp} GPUs to a row" if cp > 1 else ""
    shared += ", fused AdamW" if smallest.optimizer != setup.optimizer else ""
    lines = [
        f"nothing fits on {setup.num_gpus} x {budget.memory_bytes / GIB:.1f} GiB, {budget}: the leanest way "
        f"(micro-batch 1, every block checkpointed{shared}) needs {least.peak_bytes / GIB:.1f} GiB in its "
        f"{least.peak_phase} phase, most of it {largest}.",
        "What would fit, the cheapest first (the need per GPU, and the argument of the command line):",
        *(f"- {way}" for way in advisor.ways(smallest)),
        *(f"- {way}" for way in advisor.devices(least)),
    ]
    return "\n".join(lines)


class _Advisor:
    """Tries changes to a training and writes a line about each that fits."""

    def __init__(self, config: Any, options: dict[str, Any], budget: Budget) -> None:
        self.config = config
        self.options = options
        self.budget = budget

    def leanest(self, setup: Setup) -> tuple[MemoryEstimate, int]:
        """The least memory with any number of ranks that share a row, every block checkpointed or none."""
        sizes = group_sizes(self.config, setup, self.options)
        found = [
            (estimate(self.config, replace(setup, sac_ratio=ratio, cp=cp)), cp)
            for ratio in (Fraction(0), Fraction(1))
            for cp in sizes
        ]
        return min(found, key=lambda pair: pair[0].peak_bytes)

    def ways(self, setup: Setup) -> Iterator[str]:
        """Lines for changes that suffice alone, for pairs of others, for shorter rows and for more GPUs."""
        fits, short = list[_Way](), list[_Way]()
        for way in self._open(setup, fits):
            text = self._try(setup, (way,))
            if text:
                yield text
            (fits if text else short).append(way)
        # Packed shards take less of the host too, and are copied faster.
        on_host = [way for way in fits if way.changes.get("cpu_offload")]
        packed = [way for way in short if "packed" in way.changes]
        others = (
            (one, two)
            for one, two in itertools.combinations(short, 2)
            if not {"lora_rank", "packed"} & one.changes.keys() & two.changes.keys()
        )
        both = itertools.chain(itertools.product(on_host, packed), others)
        pairs = (self._try(setup, pair) for pair in both)
        yield from itertools.islice(filter(None, pairs), 4)
        yield from self._shorter(setup)
        yield from self._more_gpus(setup)

    def _open(self, setup: Setup, fits: list[_Way]) -> Iterator[_Way]:
        """The changes to try; a packed base only if adapters on one in 16 bits do not fit."""
        yield from _ways(setup)
        if not any("lora_rank" in way.changes for way in fits):
            yield from _packed_ways(setup, self._packs(setup))

    def _packs(self, setup: Setup) -> list[str]:
        """The ways to keep frozen weights packed, those that round nothing first."""
        try:
            build_skeleton(self.config, _with(setup, *_packed_ways(setup, [STORED])))
        except ValueError:
            return ["nf4"]
        return [STORED, "nf4"]

    def _try(self, setup: Setup, ways: tuple[_Way, ...]) -> str:
        """The line for these changes together; empty if the training does not fit with them."""
        tried = _with(setup, *ways)
        needed = self._fitting(tried)
        if needed is None:
            return ""
        if tried.cpu_offload:
            host = estimate(self.config, tried).host_bytes
            return f"{self._said(ways, needed)}; {host / GIB:.0f} GiB of host memory per GPU"
        return self._said(ways, needed)

    def _said(self, ways: tuple[_Way, ...], needed: int) -> str:
        """The line about changes with which a training needs so many bytes."""
        arguments = ", ".join(way.argument for way in ways)
        flags, costs = (" ".join(way.flag for way in ways), "; ".join(way.cost for way in ways))
        return f"{arguments}: {needed / GIB:.1f} GiB ({flags}): {costs}"

    def _fitting(self, setup: Setup) -> int | None:
        """Bytes that the leanest run needs; None if it does not fit, or the model cannot be run so."""
        try:
            needed = self.leanest(setup)[0].peak_bytes
        except (UnsupportedModelError, ValueError):
            return None
        usable = budget_of(setup.device, setup.num_gpus, self.budget.memory_bytes).usable_bytes
        return needed if needed <= usable else None

    def _shorter(self, setup: Setup) -> Iterator[str]:
        """The longest rows that fit, by halving."""
        length = setup.seq_length // 2
        while length >= _SHORTEST:
            needed = self._fitting(replace(setup, seq_length=length))
            if needed is not None:
                yield f"sequences of {length} tokens: {needed / GIB:.1f} GiB (--seq {length}): other data"
                return
            length //= 2

    def _more_gpus(self, setup: Setup) -> Iterator[str]:
        """The fewest GPUs of this kind that suffice, by doubling."""
        num_gpus = setup.num_gpus
        while num_gpus < _MOST_GPUS:
            num_gpus *= 2
            needed = self._fitting(replace(setup, num_gpus=num_gpus))
            if needed is not None:
                yield f"{num_gpus} GPUs of this kind: {needed / GIB:.1f} GiB (--gpus {num_gpus})"
                return

    def devices(self, least: MemoryEstimate) -> Iterator[str]:
        """The memory that a GPU would need, with the names of up to three such GPUs."""
        needed = self.budget.needed_for(least.peak_bytes)
        enough = sorted((gpu.memory_bytes, gpu.name) for gpu in GPUS.values() if gpu.memory_bytes >= needed)
        names = ",".join(name for _, name in enough[:3] if name != "cpu")
        yield f"GPUs of {needed / GIB:.1f} GiB" + (f" (--gpu {names})" if names else "")


def _with(setup: Setup, *ways: _Way) -> Setup:
    """The setup with changes."""
    return replace(setup, **{name: value for way in ways for name, value in way.changes.items()})


def _packed_ways(setup: Setup, kinds: list[str]) -> list[_Way]:
    """Frozen weights that are kept packed, with adapters if the whole model is trained."""
    if setup.packed is not None:
        return []
    changes: dict[str, Any] = dict.fromkeys(("frozen_dtype", "tower_dtype"), setup.param_dtype)
    adapters = {"lora_rank": _RANK} if setup.lora is None and setup.trainable is None else {}
    words = ("trains adapters, and not the model, whose matrices", "frozen matrices")[not adapters]
    cost = {STORED: "stay as they are published", "nf4": "are rounded to 4 bits"}
    return [
        _Way(
            "".join(f"{name}={value}, " for name, value in adapters.items()) + f"frozen_dtype={kind!r}",
            "".join(f"--lora {rank} " for rank in adapters.values()) + f"--frozen-dtype {kind}",
            f"{words} {cost[kind]}",
            {**changes, **adapters, "packed": kind},
        )
        for kind in kinds
    ]


def _ways(setup: Setup) -> list[_Way]:
    """Changes that this setup has not made yet, the cheapest first."""
    bf16 = torch.bfloat16
    trains_all = setup.lora is None and setup.trainable is None
    ways = (
        (
            setup.loss_impl != "chunked",
            _Way("loss_impl='chunked'", "--loss chunked", "costs nothing", {"loss_impl": "chunked"}),
        ),
        (
            not setup.compile,
            _Way("compile=True", "--compile", "a minute at the start", {"compile": True}),
        ),
        (
            setup.optimizer in ("adamw", "adamw_foreach") and setup.device.name != "cpu",
            _Way(
                "optimizer='adamw_fused'",
                "--optimizer adamw_fused",
                "the same update by one kernel",
                {"optimizer": "adamw_fused"},
            ),
        ),
        (
            setup.attention_mask,
            _Way("attention_mask=False", "--no-padding", "rows are packed", {"attention_mask": False}),
        ),
        (
            not setup.sac_offload,
            _Way(
                "sac_offload=True",
                "--offload",
                "copies to the host, which computation hides if it is long enough",
                {"sac_offload": True},
            ),
        ),
        (
            setup.optimizer.startswith("adamw") and setup.optimizer != "adamw8bit",
            _Way(
                "optimizer='adamw8bit'",
                "--optimizer adamw8bit",
                "states are rounded",
                {"optimizer": "adamw8bit"},
            ),
        ),
        (
            setup.master_dtype == torch.float32 and setup.lora is None,
            _Way(
                "master_dtype=torch.bfloat16, optimizer='adamw_stochastic'",
                "--masters bfloat16 --optimizer adamw_stochastic",
                "parameters and states are rounded (StochasticAdamW)",
                {"master_dtype": bf16, "frozen_dtype": bf16, "optimizer": "adamw_stochastic"},
            ),
        ),
        (
            not setup.cpu_offload,
            _Way("cpu_offload=True", "--cpu-offload", "the update runs on the host", {"cpu_offload": True}),
        ),
        (
            trains_all,
            _Way(
                f"lora_rank={_RANK}",
                f"--lora {_RANK}",
                "trains adapters, and not the model",
                {"lora_rank": _RANK, "frozen_dtype": setup.param_dtype},
            ),
        ),
    )
    return [way for is_open, way in ways if is_open]
