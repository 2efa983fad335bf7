"""How much memory a training step needs on each GPU, from the config alone."""

import math
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_sft._process.words import answered
from fsdp_sft._tensors.sharding import imbalance, shard_numel
from fsdp_sft.attention.context_parallel import check_shareable
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.planner.model import CHECKED_FAMILIES, Skeleton, as_config, build_skeleton
from fsdp_sft.planner.parameters import Group
from fsdp_sft.planner.replay import GRADIENTS, MASTERS, OPTIMIZER, replay
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.setup import Setup, make_setup
from fsdp_sft.planner.trace import trace
from fsdp_sft.sac import host_bytes_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# How evenly the ranks share a model's parameters, and which parameter they share least evenly.


@dataclass(frozen=True)
class ShardBalance:
    """How many elements the fullest rank has, compared with the mean.

    Attributes:
        ranks: Number of ranks that the parameters are sharded over.
        largest_over_mean: Elements of the fullest rank divided by the mean; 1.0 is even.
        parameter: Name of the parameter that is most uneven, or of the first of several that are alike; empty
            if all are even.
        shape: Shape of that parameter.
        dim: Dimension along which that parameter is cut.
        parameter_over_mean: The fullest rank's part of that parameter divided by the mean.
        idle_ranks: Number of ranks that have none of that parameter.
    """

    ranks: int
    largest_over_mean: float
    parameter: str = ""
    shape: tuple[int, ...] = ()
    dim: int = 0
    parameter_over_mean: float = 1.0
    idle_ranks: int = 0

    def __str__(self) -> str:
        if not self.parameter:
            return f"all parameters lie evenly on {self.ranks} ranks"
        shape = " x ".join(map(str, self.shape))
        text = (
            f"the fullest of {self.ranks} ranks has {self.largest_over_mean:.3f} times the mean; most uneven "
            f"is {self.parameter} ({shape}), cut along dimension {self.dim}: "
            f"{self.parameter_over_mean:.2f} times"
        )
        return text + (f", {self.idle_ranks} ranks have none of it" if self.idle_ranks else "")


def shard_balance(parts: list[tuple[Group, int, int]], ranks: int) -> ShardBalance:
    """How evenly a model's groups are sharded.

    Args:
        parts: The groups of a model as ``Skeleton.parts`` gives them.
        ranks: Number of ranks that the parameters are sharded over; experts that are distributed are sharded
            over those of them that have the same ones.
    """
    most = total = 0
    worst: tuple[float, str, tuple[int, ...], int, int] = (0.0, "", (), ranks, 0)
    for group, over, count in parts:
        for name, shape, dim in group.with_dims(over):
            here, elements = shard_numel(shape, over, dim), math.prod(shape)
            most, total = most + count * here, total + count * elements * ranks // over
            excess = count * (here - elements / over)
            worst = max(worst, (excess, name, shape, over, dim), key=lambda found: found[0])
    excess, name, shape, over, dim = worst
    if excess < 1 or not total:
        return ShardBalance(ranks, most * ranks / total if total else 1.0)
    size = shape[dim] if shape else 1
    rows = -(-size // over)
    return ShardBalance(
        ranks=ranks,
        largest_over_mean=most * ranks / total,
        parameter=name,
        shape=shape,
        dim=dim,
        parameter_over_mean=imbalance(size, over),
        idle_ranks=(over - -(-size // rows)) * ranks // over,
    )


_GIB = 1 << 30
_EVEN = ShardBalance(1, 1.0)
_NOTABLE_PADDING = 0.05


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank in the steady state: tensors that are alive, not what the allocator has reserved.

    Attributes:
        peak_bytes: Most bytes alive during an optimizer step, as ``torch.cuda.max_memory_allocated()`` counts
            them; ``plan_run`` knows how much of a device's memory it may take.
        peak_phase: Phase of that moment: ``"loss"`` (forward, loss, and its backward down to the last block),
            ``"backward"`` (the blocks' backward and the reduction of gradients) or ``"optimizer"``.
        breakdown: Bytes alive at that moment by kind; the values add up to ``peak_bytes``.
        parameters: Number of parameters of the model; tied ones count once.
        active_parameters: Number of parameters that one token passes through; fewer than ``parameters`` for a
            mixture of experts.
        activation_bytes: Bytes that the forward of all blocks leaves on the device for the backward.
        host_bytes: Host memory per GPU: pinned, in which activations wait (``sac_offload``), or that of
            shards, gradients and optimizer states (``cpu_offload``).
        sharding: How evenly the ranks share the parameters, and which parameter they share least evenly.
        notes: Caveats, such as a family that was never compared with a measurement.
    """

    peak_bytes: int
    peak_phase: str
    breakdown: dict[str, int]
    parameters: int
    active_parameters: int
    activation_bytes: int
    host_bytes: int = 0
    sharding: ShardBalance = _EVEN
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = sorted(self.breakdown.items(), key=lambda item: -item[1])
        width = max(len(name) for name in self.breakdown)
        lines = [f"{self.peak_bytes / _GIB:.2f} GiB per GPU at the peak, in the {self.peak_phase} phase"]
        lines += [
            f"  {name:<{width}}  {size / _GIB:8.2f} GiB  {size / self.peak_bytes:6.1%}"
            for name, size in parts
        ]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@answered
def estimate_memory(config: "PreTrainedConfig | str | os.PathLike[str]", run: Run) -> MemoryEstimate:
    """Estimate the peak memory per GPU of training a causal language model with this library.

    This needs no weights, process group or GPU. The model is built on the meta device, where one block of
    each kind runs forward and backward to show what it keeps and what it needs while it runs. Then an
    optimizer step is replayed in the order in which FSDP2 allocates and frees.

    Args:
        config: Config of a decoder-only model: a transformers config, a folder or a Hub id.
        run: The way to train it.

    Returns:
        The estimate. Families that were never compared with a measurement carry a note.

    Raises:
        ValueError: If a field of ``run`` is out of range, the config is not that of a causal language model,
            or the model's forward depends on values, which the meta device does not have.
        UnsupportedModelError: If the model does not support ``cp``, as far as that shows without weights, or
            transformers has no expert-parallel plan for it.
        TypeError: If ``run`` is not a ``Run``.

    Example:
        >>> from dataclasses import replace
        >>> run = fs.Run(num_gpus=8, micro_batch_size=1, seq_length=4096)
        >>> estimate = fs.estimate_memory(config, run)
        >>> estimate.peak_phase
        'loss'
        >>> sum(estimate.breakdown.values()) == estimate.peak_bytes
        True
        >>> long = replace(run, seq_length=65536, attention_mask=False)
        >>> shared = replace(long, cp=2)
        >>> alone, shared = (
        ...     fs.estimate_memory(config, one).activation_bytes for one in (long, shared)
        ... )
        >>> alone / shared
        2.0
    """
    if not isinstance(run, Run):
        raise TypeError(f"run must be a Run, such as Run(num_gpus=8, ...), got {type(run).__name__}")
    return estimate(as_config(config), make_setup(run))


def _states_on_host(config: "PreTrainedConfig", setup: Setup) -> int:
    """Bytes of a rank's shards, gradients and optimizer states where an offload moves them to the host."""
    if not setup.cpu_offload:
        return 0
    on_device = estimate(config, replace(setup, cpu_offload=False, sac_offload=False)).breakdown
    return sum(on_device.get(part, 0) for part in (MASTERS, OPTIMIZER, GRADIENTS))


def check_options(**options: Any) -> Setup:
    """The setup of a ``Run`` with these fields.

    Raises:
        TypeError: For a field that ``Run`` does not have.
    """
    return make_setup(Run(**options))


def estimate(config: "PreTrainedConfig", setup: Setup) -> MemoryEstimate:
    """``estimate_memory`` for validated arguments."""
    skeleton = build_skeleton(config, setup)
    if setup.cp > 1:
        check_shareable(skeleton.model, setup.cp)
    if setup.ep_size > 1:
        check_experts(skeleton.experts, skeleton.family, setup.ep_size)
    seen = trace(skeleton, setup)
    peak = replay(skeleton, seen, setup)
    checkpointed = setup.checkpointed(len(skeleton.blocks))
    activations = sum(
        seen.blocks[kind].left(index in checkpointed)
        for index, kind in enumerate(skeleton.kinds)
        if index >= skeleton.first_backward
    )
    leaving = sorted(checkpointed) if setup.activations_leave else []
    left = [seen.blocks[skeleton.kinds[index]].output for index in leaving]
    # The input of the last checkpointed block stays on the device: the backward begins with that block.
    activations -= sum(left[:-1])
    balance = shard_balance(skeleton.parts(setup), setup.num_shards)
    return MemoryEstimate(
        peak_bytes=peak.total,
        peak_phase=peak.phase,
        breakdown=peak.parts,
        parameters=skeleton.parameters,
        active_parameters=skeleton.active_parameters,
        activation_bytes=activations,
        host_bytes=sum(map(host_bytes_for, left)) + _states_on_host(config, setup),
        sharding=balance,
        notes=_notes(skeleton, setup, balance),
    )


def check_experts(experts: Collection[int], family: str, ep_size: int) -> None:
    """Refuse an ``ep_size`` that does not suit a model's experts.

    Args:
        experts: Their number in each layer that has some which ranks can share out.
        family: ``config.model_type``.
        ep_size: Ranks that share them out, more than 1.

    Raises:
        UnsupportedModelError: If there are none.
        ValueError: If they cannot be shared out evenly.
    """
    if not experts:
        raise UnsupportedModelError(
            f"transformers has no plan by which ranks share out experts of {family!r}: plan it with ep_size=1"
        )
    if uneven := [number for number in experts if number % ep_size]:
        raise ValueError(f"ep_size={ep_size} does not divide the {uneven[0]} experts of a layer")


def _of_packed(skeleton: Skeleton, setup: Setup) -> str:
    """What is packed, and what a value takes."""
    parts = skeleton.parts(setup)
    values = sum(n * part.packed_elements() / over for part, over, n in parts)
    taken = sum(n * part.packed_bytes(over) for part, over, n in parts)
    packed = sum(n * group.packed_elements() for group, n in skeleton.distinct_groups)
    return (
        f"{packed / 1e9:.3g}B of {skeleton.parameters / 1e9:.3g}B parameters are frozen and kept packed "
        f"({setup.packed}): {taken * 8 / values:.2f} bits each, with scales and what fills shards up"
    )


def _notes(skeleton: Skeleton, setup: Setup, balance: ShardBalance) -> tuple[str, ...]:
    """Caveats of the estimate."""
    published = skeleton.published
    notes = [] if published is None else [published.note(skeleton.parameters, setup.packed)]
    if setup.packed is not None:
        notes.append(_of_packed(skeleton, setup))
    if skeleton.family not in CHECKED_FAMILIES:
        notes.append(
            f"model type {skeleton.family} was followed like any other but never compared with a measurement"
        )
    if balance.largest_over_mean > 1 + _NOTABLE_PADDING:
        notes.append(f"{balance}; fewer shards (dp_replicate) can need less")
    if not setup.device.checked and setup.device.name != "cpu":
        notes.append(
            f"what attention keeps on {setup.device.name} was never compared with a measurement there"
        )
    return tuple(notes)
