"""What to change when nothing fits, the cheapest change first."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from fsdp_sft._process.gpus import GIB, GPUS
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.planner.budget import Budget, budget_of
from fsdp_sft.planner.estimate import MemoryEstimate, estimate
from fsdp_sft.planner.setup import Setup, with_leanest_update
from fsdp_sft.shard.packing import STORED

_MOST_GPUS = 4096
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
    least = _leanest(config, smallest)
    largest = max(least.breakdown, key=lambda part: least.breakdown[part])
    fused = ", fused AdamW" if smallest.optimizer != setup.optimizer else ""
    lines = [
        f"nothing fits on {setup.num_gpus} x {budget.memory_bytes / GIB:.1f} GiB, {budget}: the leanest way "
        f"(micro-batch 1, every block checkpointed{fused}) needs {least.peak_bytes / GIB:.1f} GiB in its "
        f"{least.peak_phase} phase, most of it {largest}.",
        "What would fit, the cheapest first (the need per GPU, and the argument of the command line):",
        *(f"- {change}" for change in _changes(config, smallest, budget)),
        *(f"- {more}" for more in _more_gpus(config, smallest, budget)),
        f"- {_device(budget.needed_for(least.peak_bytes))}",
    ]
    return "\n".join(lines)


def _leanest(config: Any, setup: Setup) -> MemoryEstimate:
    """The least memory, with every block checkpointed or none."""
    found = [estimate(config, replace(setup, sac_ratio=Fraction(ratio))) for ratio in (0, 1)]
    return min(found, key=lambda one: one.peak_bytes)


def _fitting(config: Any, setup: Setup, budget: Budget) -> MemoryEstimate | None:
    """The leanest run's memory; None if it does not fit, or the model cannot be run so."""
    try:
        needed = _leanest(config, setup)
    except (UnsupportedModelError, ValueError):
        return None
    usable = budget_of(setup.device, setup.num_gpus, budget.memory_bytes).usable_bytes
    return needed if needed.peak_bytes <= usable else None


def _changes(config: Any, setup: Setup, budget: Budget) -> Iterator[str]:
    """A line for each change that suffices alone; a packed base only if adapters on 16 bits do not."""
    fits_adapters = False
    for way in _ways(setup):
        is_packed = "packed" in way.changes
        if is_packed and fits_adapters:
            continue
        changed = replace(setup, **way.changes)
        needed = _fitting(config, changed, budget)
        if needed is not None:
            fits_adapters |= "lora_rank" in way.changes and not is_packed
            host = f"; {needed.host_bytes / GIB:.0f} GiB of host memory per GPU" * changed.cpu_offload
            yield f"{way.argument}: {needed.peak_bytes / GIB:.1f} GiB ({way.flag}): {way.cost}{host}"


def _more_gpus(config: Any, setup: Setup, budget: Budget) -> Iterator[str]:
    """The fewest GPUs of this kind that suffice, by doubling."""
    num_gpus = setup.num_gpus
    while num_gpus < _MOST_GPUS:
        num_gpus *= 2
        needed = _fitting(config, replace(setup, num_gpus=num_gpus), budget)
        if needed is not None:
            yield f"{num_gpus} GPUs of this kind: {needed.peak_bytes / GIB:.1f} GiB (--gpus {num_gpus})"
            return


def _device(needed: int) -> str:
    """The memory that a GPU would need, with the names of up to three such GPUs."""
    enough = sorted((gpu.memory_bytes, gpu.name) for gpu in GPUS.values() if gpu.memory_bytes >= needed)
    names = ",".join(name for _, name in enough[:3] if name != "cpu")
    return f"GPUs of {needed / GIB:.1f} GiB" + (f" (--gpu {names})" if names else "")


def _packed_ways(setup: Setup) -> list[_Way]:
    """Frozen weights that are kept packed, with adapters if the whole model is trained."""
    if setup.packed is not None:
        return []
    changes: dict[str, Any] = dict.fromkeys(("frozen_dtype", "tower_dtype"), setup.param_dtype)
    adapters = {"lora_rank": _RANK} if setup.lora is None and setup.trainable is None else {}
    words = ("trains adapters, and not the model, whose matrices", "frozen matrices")[not adapters]
    kinds = {STORED: "stay as they are published", "nf4": "are rounded to 4 bits"}
    return [
        _Way(
            "".join(f"{name}={value}, " for name, value in adapters.items()) + f"frozen_dtype={kind!r}",
            "".join(f"--lora {rank} " for rank in adapters.values()) + f"--frozen-dtype {kind}",
            f"{words} {cost}",
            {**changes, **adapters, "packed": kind},
        )
        for kind, cost in kinds.items()
    ]


def _ways(setup: Setup) -> list[_Way]:
    """Changes that this setup has not made yet, the cheapest first."""
    bf16 = torch.bfloat16
    trains_all = setup.lora is None and setup.trainable is None
    node = math.gcd(setup.num_shards, setup.device.gpus_per_node)
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
            setup.cp == setup.ep_size == 1 < node,
            _Way(f"cp={node}", f"--cp {node}", "GPUs share each row, and exchange parts of it", {"cp": node}),
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
    return [*(way for is_open, way in ways if is_open), *_packed_ways(setup)]
