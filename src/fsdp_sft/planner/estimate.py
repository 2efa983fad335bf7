"""How much memory a training step needs on each GPU, from the config alone."""

import inspect
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fsdp_sft.context_parallel import check_shareable
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.planner.experts import ExpertsImpl
from fsdp_sft.planner.model import CHECKED_FAMILIES, Skeleton, as_config, build_skeleton
from fsdp_sft.planner.replay import replay
from fsdp_sft.planner.setup import GradSync, LossImpl, Optimizer, Setup, make_setup
from fsdp_sft.planner.shards import ShardBalance, shard_balance
from fsdp_sft.planner.trace import Footprint, trace
from fsdp_sft.sac import Placement, Ratio, host_bytes_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_GIB = 1 << 30
_EVEN = ShardBalance(1, 1.0)
_NOTABLE_PADDING = 0.05


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank in the steady state: tensors that are alive, not what the allocator has reserved.

    Attributes:
        peak_bytes: Bytes alive at the fullest moment of an optimizer step. Compare it with
            ``torch.cuda.max_memory_allocated()``; ``plan_run`` knows how much of a device it may be.
        peak_phase: Phase of that moment: ``"loss"`` (forward, loss, and its backward down to the last block),
            ``"backward"`` (the blocks' backward and the reduction of gradients) or ``"optimizer"``.
        breakdown: Bytes alive at that moment by kind; the values add up to ``peak_bytes``.
        parameters: Number of parameters of the model; tied ones count once.
        active_parameters: Number of parameters that one token passes through; fewer than ``parameters`` for a
            mixture of experts.
        activation_bytes: Bytes that the forward of all blocks leaves on the device for the backward.
        host_bytes: Pinned host memory per GPU in which activations wait (``sac_offload``).
        sharding: How evenly the ranks share the parameters, and which parameter they share least evenly.
        notes: What a reader should know about this estimate, such as a family that was never compared with a
            measurement.
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


def estimate_memory(
    config: "PreTrainedConfig | str | os.PathLike[str]",
    *,
    num_gpus: int,
    micro_batch_size: int,
    seq_length: int,
    sac_ratio: Ratio = 0,
    sac_placement: Placement = "even",
    compile: bool = False,  # noqa: A002  # the word of load_pretrained
    master_dtype: torch.dtype = torch.float32,
    loss_impl: LossImpl = "chunked",
    attention_mask: bool = True,
    gpu: str = "h100",
    grad_accum_steps: int = 1,
    dp_replicate: int = 1,
    cp: int = 1,
    sac_blocks: Iterable[int] | None = None,
    optimizer: Optimizer = "adamw",
    grad_sync: GradSync = "each",
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    sac_offload: bool = False,
    trainable: str | Iterable[str] | None = None,
    lora_rank: int = 0,
    lora_targets: str | Iterable[str] | None = None,
    frozen_dtype: torch.dtype | None = None,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    logits_dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
    experts_impl: ExpertsImpl = "grouped_mm",
    ep_size: int = 1,
) -> MemoryEstimate:
    """Estimate the peak memory per GPU of training a causal language model with this library.

    Three things happen, none of which needs weights, a process group or a GPU. The model is built on the meta
    device. One block of each kind runs forward and backward there, which shows what it keeps for the backward
    and what it needs while it runs. From that one optimizer step is replayed, in the order in which FSDP2
    allocates and frees.

    Args:
        config: Config of a decoder-only model: a transformers config, a folder or a Hub id.
        num_gpus: Number of all ranks, >= 1.
        micro_batch_size: Sequences per rank and forward.
        seq_length: Tokens per sequence, padding included.
        sac_ratio: Fraction of blocks that are checkpointed, as for ``apply_sac``.
        sac_placement: ``"even"`` or ``"prefix"``.
        compile: Whether the blocks are compiled (``compile_blocks``).
        master_dtype: Dtype of the stored shards, hence of gradients and optimizer states.
        loss_impl: ``"chunked"``, or ``"logits"`` for logits in full.
        attention_mask: Whether batches are padded, so that attention gets a mask.
        gpu: The GPU, which decides the attention kernels and the speed: ``"h100"``, ``"4090"``, ``"mi300x"``
            and others (an unknown name raises with the list), one with another memory size such as
            ``"a100-40gb"``, or any GPU described as ``"NAME=GiB,TFLOPs,GB/s"``.
        grad_accum_steps: Micro-batches per optimizer step.
        dp_replicate: Replicas of the sharded model (HSDP); divides ``num_gpus``.
        cp: Ranks that share the tokens of each row (``use_context_parallel``); ``dp_replicate * cp`` divides
            ``num_gpus``, and ``cp`` the query heads. Parameters are sharded over them as well.
        sac_blocks: Indices of the checkpointed blocks, in place of ratio and placement.
        optimizer: ``"adamw"`` (as torch runs it by default: ``foreach`` on a GPU, a loop on a CPU),
            ``"adamw_foreach"``, ``"adamw_fused"``, ``"adamw_for_loop"``, ``"adamw_stochastic"``
            (``StochasticAdamW``), ``"adamw8bit"``, ``"sgd"``, ``"sgd_momentum"``.
        grad_sync: When gradients are reduced: after ``"each"`` micro-batch, or only after the ``"last"``,
            until which whole gradients are kept.
        reshard_after_forward: Whether blocks are freed between their forward and their backward; False keeps
            them gathered (ZeRO-2).
        cpu_offload: Whether shards, gradients and optimizer states live on the host, which is then not
            counted.
        sac_offload: Whether what checkpointed blocks keep waits on the host: ``apply_sac(offload=True)``.
        trainable: Regular expressions for the names of trained parameters; None trains all.
        lora_rank: Rank of adapters beside linear layers. Above 0 all else is frozen, except ``trainable``.
        lora_targets: Names of those layers, such as ``["q_proj", "v_proj"]``; None takes all in the blocks.
        frozen_dtype: Dtype of frozen shards; None is ``param_dtype`` with LoRA and ``master_dtype`` without.
        param_dtype: Dtype of the computation.
        reduce_dtype: Dtype of the gradients' reduction.
        logits_dtype: Dtype of the cross entropy with ``loss_impl="logits"``. None is ``param_dtype``: a plain
            loop that gives the model's logits to ``F.cross_entropy`` and holds on to them. ``torch.float32``
            is what ``causal_lm_loss(impl="logits")`` does; ``cp > 1`` allows nothing else.
        chunk_size: Tokens per chunk of the chunked loss, as for ``linear_cross_entropy_sum``.
        experts_impl: How experts are computed, as for ``prepare_experts``: ``"grouped_mm"``, or ``"eager"``,
            whose backward holds a gradient of all of a layer's experts for each of them in turn.
        ep_size: Ranks that share out the experts of a mixture (``load_pretrained(ep_size=)``);
            ``dp_replicate * ep_size`` divides ``num_gpus``, and ``ep_size`` the number of experts. The
            estimate assumes that each rank gets as many tokens as it sends.

    Returns:
        The estimate. Families that were never compared with a measurement carry a note.

    Raises:
        ValueError: If an argument is out of range, the config is not that of a causal language model, or the
            model's forward depends on values, which the meta device does not have.
        UnsupportedModelError: If ranks cannot share rows of the model, as far as that shows without weights,
            or transformers has no plan by which they share out its experts.

    Example:
        >>> estimate = fs.estimate_memory(
        ...     config, num_gpus=8, micro_batch_size=1, seq_length=4096
        ... )
        >>> estimate.peak_phase
        'loss'
        >>> sum(estimate.breakdown.values()) == estimate.peak_bytes
        True
        >>> run = {"num_gpus": 8, "micro_batch_size": 1, "attention_mask": False}
        >>> long = [fs.estimate_memory(config, **run, seq_length=65536, cp=cp) for cp in (1, 2)]
        >>> alone, shared = (estimate.activation_bytes for estimate in long)
        >>> alone / shared
        2.0
    """
    setup = make_setup(
        num_gpus=num_gpus,
        micro_batch_size=micro_batch_size,
        seq_length=seq_length,
        sac_ratio=sac_ratio,
        sac_placement=sac_placement,
        sac_blocks=sac_blocks,
        compile=compile,
        master_dtype=master_dtype,
        frozen_dtype=frozen_dtype,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        loss_impl=loss_impl,
        logits_dtype=logits_dtype,
        chunk_size=chunk_size,
        attention_mask=attention_mask,
        gpu=gpu,
        grad_accum_steps=grad_accum_steps,
        grad_sync=grad_sync,
        dp_replicate=dp_replicate,
        cp=cp,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
        sac_offload=sac_offload,
        optimizer=optimizer,
        trainable=trainable,
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        experts_impl=experts_impl,
        ep_size=ep_size,
    )
    return estimate(as_config(config), setup)


def check_options(**options: Any) -> Setup:
    """The setup that ``estimate_memory`` makes of its arguments.

    Raises:
        TypeError: For an argument that ``estimate_memory`` does not have.
    """
    signature = inspect.signature(estimate_memory)
    bound = signature.bind(None, **options)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    del arguments["config"]
    return make_setup(**arguments)


def estimate(config: "PreTrainedConfig", setup: Setup) -> MemoryEstimate:
    """The estimate for arguments that have been checked."""
    skeleton = build_skeleton(config, setup)
    if setup.cp > 1:
        check_shareable(skeleton.model, setup.cp)
    if setup.ep_size > 1:
        _check_experts(skeleton, setup.ep_size)
    seen = trace(skeleton, setup)
    peak = replay(skeleton, seen, setup)
    checkpointed = setup.checkpointed(len(skeleton.blocks))
    activations = sum(
        _kept(seen.blocks[kind], checkpointed=index in checkpointed)
        for index, kind in enumerate(skeleton.kinds)
        if index >= skeleton.first_backward
    )
    left = [seen.blocks[skeleton.kinds[index]].output for index in sorted(checkpointed)]
    if not setup.activations_leave:
        left = []
    # The input of the last checkpointed block stays on the device: the backward begins with that block.
    activations -= sum(left[:-1])
    balance = shard_balance(skeleton.distinct_groups, setup.num_shards, setup.ep_size)
    return MemoryEstimate(
        peak_bytes=peak.total,
        peak_phase=peak.phase,
        breakdown=peak.parts,
        parameters=skeleton.parameters,
        active_parameters=skeleton.active_parameters,
        activation_bytes=activations,
        host_bytes=sum(map(host_bytes_for, left)),
        sharding=balance,
        notes=_notes(skeleton, setup, balance),
    )


def _check_experts(skeleton: Skeleton, ep_size: int) -> None:
    """Refuse ranks that cannot share out the experts of this model."""
    if not skeleton.experts:
        raise UnsupportedModelError(
            f"transformers has no plan by which ranks share out experts of {skeleton.family!r}: plan it with "
            "ep_size=1"
        )
    if any(number % ep_size for number in skeleton.experts):
        raise ValueError(f"ep_size={ep_size} does not divide the {skeleton.experts[0]} experts of a layer")


def _kept(block: Footprint, *, checkpointed: bool) -> int:
    """Bytes that a block leaves for the backward."""
    return block.output + block.decisions if checkpointed else block.kept


def _notes(skeleton: Skeleton, setup: Setup, balance: ShardBalance) -> tuple[str, ...]:
    """What a reader of the estimate should know."""
    notes = []
    if skeleton.family not in CHECKED_FAMILIES:
        notes.append(
            f"model type {skeleton.family} was followed like any other but never compared with a measurement"
        )
    if balance.largest_over_mean > 1 + _NOTABLE_PADDING:
        notes.append(f"{balance}; fewer shards (dp_replicate) can need less")
    if not setup.gpu.checked and setup.gpu.name != "cpu":
        notes.append(f"what attention keeps on {setup.gpu.name} was never compared with a measurement there")
    return tuple(notes)
