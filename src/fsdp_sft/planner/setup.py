"""A validated ``Run``."""

import functools
import re
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, get_args

import torch

from fsdp_sft._process.gpus import Gpu, gpu_named
from fsdp_sft.planner.experts import ExpertsImpl
from fsdp_sft.planner.run import GradSync, LossImpl, Optimizer, Run
from fsdp_sft.sac import Placement, parse_ratio, select_block_indices
from fsdp_sft.shard.packing import KINDS, packed_or_dtype

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_AT_LEAST = {
    **dict.fromkeys(("num_gpus", "micro_batch_size", "seq_length", "grad_accum_steps", "dp_replicate"), 1),
    **dict.fromkeys(("cp", "ep_size", "chunk_size"), 1),
    "lora_rank": 0,
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "loss_impl": get_args(LossImpl),
    "optimizer": get_args(Optimizer),
    "experts_impl": get_args(ExpertsImpl),
    "grad_sync": get_args(GradSync),
    **dict.fromkeys(
        ("compile", "attention_mask", "reshard_after_forward", "cpu_offload", "sac_offload"), (True, False)
    ),
    **dict.fromkeys(("master_dtype", "param_dtype", "reduce_dtype"), _FLOATING),
    "frozen_dtype": (*_FLOATING, *KINDS, None),
    "logits_dtype": (*_FLOATING, None),
}


@dataclass(frozen=True, kw_only=True)
class Setup(Run):
    """A ``Run`` whose fields are valid, without None for a default.

    Attributes:
        device: The GPU that ``gpu`` names.
        packed: How frozen matrices of blocks are kept packed, such as ``"nf4"``; None: not at all.
        frozen_dtype: Dtype of the shards of what is frozen, and not packed.
        tower_dtype: Dtype of the shards of a vision-language model's towers, as ``load_pretrained`` has them.
    """

    device: Gpu
    packed: str | None
    sac_ratio: Fraction
    frozen_dtype: torch.dtype
    tower_dtype: torch.dtype
    logits_dtype: torch.dtype
    sac_blocks: tuple[int, ...] | None
    trainable: tuple[str, ...] | None
    lora_targets: tuple[str, ...] | None

    @property
    def lora(self) -> tuple[int, tuple[str, ...]] | None:
        """(rank, targets) of the adapters; None without."""
        return (self.lora_rank, self.lora_targets or ("all-linear",)) if self.lora_rank else None

    @property
    def num_shards(self) -> int:
        """Number of ranks that a parameter is sharded over."""
        return self.num_gpus // self.dp_replicate

    @property
    def activations_leave(self) -> bool:
        """Whether what checkpointed blocks keep is offloaded; on a CPU it is on the host already."""
        return self.sac_offload and self.device.name != "cpu"

    def checkpointed(self, num_blocks: int) -> frozenset[int]:
        """Indices of the blocks that are recomputed in the backward."""
        if self.sac_blocks is None:
            return _selected(num_blocks, self.sac_ratio, self.sac_placement)
        outside = [index for index in self.sac_blocks if not 0 <= index < num_blocks]
        if outside:
            raise ValueError(f"sac_blocks must lie in [0, {num_blocks}), got {outside}")
        return frozenset(self.sac_blocks)


@functools.lru_cache(maxsize=256)
def _selected(num_blocks: int, ratio: Fraction, placement: Placement) -> frozenset[int]:
    return frozenset(select_block_indices(num_blocks, ratio, placement=placement))


def make_setup(run: Run) -> Setup:
    """Check all that can be checked without the model, and replace None by defaults.

    Raises:
        ValueError: For a value out of range; the message says what is allowed.
    """
    for name, least in _AT_LEAST.items():
        if name != "chunk_size" or run.chunk_size is not None:
            check_integer(name, getattr(run, name), least)
    _check_ranks(run)
    for name, allowed in _CHOICES.items():
        _check_choice(name, getattr(run, name), allowed)
    if run.optimizer == "adamw_stochastic" and run.master_dtype == torch.float16:
        raise ValueError(
            "StochasticAdamW rounds to bfloat16 or keeps float32, got master_dtype=torch.float16"
        )
    if run.lora_targets is not None and not run.lora_rank:
        raise ValueError(f"lora_targets={run.lora_targets!r} is for adapters: give lora_rank too")
    ratio = parse_ratio(run.sac_ratio)
    if run.sac_blocks is not None:
        if ratio:
            raise ValueError("give sac_ratio or sac_blocks, and not both: each says which blocks recompute")
        for index in run.sac_blocks:
            check_integer("each of sac_blocks", index, 0)
    select_block_indices(1, ratio, placement=run.sac_placement)
    packed, kept = packed_or_dtype(run.frozen_dtype)
    frozen = run.param_dtype if packed is not None else kept
    return Setup(
        **{
            **{field.name: getattr(run, field.name) for field in fields(Run)},
            "device": gpu_named(run.gpu),
            "sac_ratio": ratio,
            "packed": packed,
            "frozen_dtype": frozen or (run.param_dtype if run.lora_rank else run.master_dtype),
            "tower_dtype": frozen or run.param_dtype,
            "logits_dtype": _logits_dtype(run),
            "sac_blocks": None if run.sac_blocks is None else tuple(sorted(set(run.sac_blocks))),
            "trainable": _patterns("trainable", run.trainable),
            "lora_targets": _patterns("lora_targets", run.lora_targets),
        }
    )


def _check_ranks(run: Run) -> None:
    """Refuse groups of ranks that do not divide the ranks, or exclude each other."""
    if run.num_gpus % run.dp_replicate:
        raise ValueError(f"dp_replicate must divide num_gpus, got {run.dp_replicate} of {run.num_gpus}")
    if run.ep_size > 1 and run.cp > 1:
        raise ValueError(
            "ranks that share rows cannot share out experts: one of cp and ep_size has to be 1, got "
            f"{run.cp} and {run.ep_size}"
        )
    for name, ranks in (("cp", run.cp), ("ep_size", run.ep_size)):
        if run.num_gpus % (run.dp_replicate * ranks):
            raise ValueError(
                f"dp_replicate x {name} must divide num_gpus, got {run.dp_replicate} x {ranks} of "
                f"{run.num_gpus}"
            )


def _logits_dtype(run: Run) -> torch.dtype:
    """The dtype of the cross entropy; where ranks share rows it is float32 at least."""
    if run.cp == 1:
        return run.logits_dtype or run.param_dtype
    wide = torch.promote_types(run.param_dtype, torch.float32)
    if run.loss_impl == "logits" and run.logits_dtype not in (None, wide):
        raise ValueError(
            f"with cp={run.cp} the loss of logits is computed in {wide}, got logits_dtype="
            f"{run.logits_dtype}: a plain loop does not know of rows that ranks share; leave it at None"
        )
    return wide


def with_leanest_update(setup: Setup, options: dict[str, Any]) -> Setup:
    """The setup with fused AdamW, which makes no copies, unless an optimizer was asked for."""
    if "optimizer" in options or setup.device.name == "cpu":
        return setup
    return replace(setup, optimizer="adamw_fused")


def check_integer(name: str, value: Any, smallest: int) -> None:
    """Raise a ValueError unless a value is an integer of at least ``smallest``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"{name} must be an integer of at least {smallest}, got {value!r}")


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _patterns(name: str, value: Any) -> tuple[str, ...] | None:
    """One string or several as a tuple."""
    if value is None:
        return None
    several = (value,) if isinstance(value, str) else tuple(value)
    if not several or not all(isinstance(entry, str) for entry in several):
        raise ValueError(f"{name} takes texts, got {value!r}")
    for entry in several:
        try:
            re.compile(entry)
        except re.error as error:
            raise ValueError(f"{name} takes regular expressions, and {entry!r} is none: {error}") from error
    return several
