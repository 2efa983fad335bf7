"""A validated ``Run``."""

import functools
import re
from dataclasses import dataclass
from typing import Any, get_args

import torch

from fsdp_sft._process.gpus import Gpu, gpu_named
from fsdp_sft.planner.experts import ExpertsImpl
from fsdp_sft.planner.run import GradSync, LossImpl, Optimizer, Run
from fsdp_sft.sac import Placement, Ratio, parse_ratio, select_block_indices

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Setup:
    """The fields of a valid ``Run``, without None for a default; ``lora`` is (rank, targets) or None."""

    num_gpus: int
    micro_batch_size: int
    seq_length: int
    sac_ratio: Ratio
    sac_placement: Placement
    sac_blocks: tuple[int, ...] | None
    compile: bool
    master_dtype: torch.dtype
    frozen_dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    loss_impl: LossImpl
    logits_dtype: torch.dtype
    chunk_size: int | None
    attention_mask: bool
    gpu: Gpu
    grad_accum_steps: int
    grad_sync: GradSync
    dp_replicate: int
    cp: int
    reshard_after_forward: bool
    cpu_offload: bool
    sac_offload: bool
    optimizer: Optimizer
    trainable: tuple[str, ...] | None
    lora: tuple[int, tuple[str, ...]] | None
    experts_impl: ExpertsImpl = "grouped_mm"
    ep_size: int = 1

    @property
    def num_shards(self) -> int:
        """Number of ranks that a parameter is sharded over."""
        return self.num_gpus // self.dp_replicate

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of each sequence that one rank has, filler included."""
        return -(-self.seq_length // self.cp)

    @property
    def activations_leave(self) -> bool:
        """Whether what checkpointed blocks keep is offloaded; on a CPU it is on the host already."""
        return self.sac_offload and self.gpu.name != "cpu"

    def checkpointed(self, num_blocks: int) -> frozenset[int]:
        """Indices of the blocks that are recomputed in the backward."""
        if self.sac_blocks is None:
            return _selected(num_blocks, self.sac_ratio, self.sac_placement)
        outside = [index for index in self.sac_blocks if not 0 <= index < num_blocks]
        if outside:
            raise ValueError(f"sac_blocks must lie in [0, {num_blocks}), got {outside}")
        return frozenset(self.sac_blocks)


@functools.lru_cache(maxsize=256)
def _selected(num_blocks: int, ratio: Ratio, placement: Placement) -> frozenset[int]:
    return frozenset(select_block_indices(num_blocks, ratio, placement=placement))


def make_setup(run: Run) -> Setup:
    """Check all that can be checked without the model, and replace None by defaults.

    Raises:
        ValueError: For a value out of range; the message says what is allowed.
    """
    fields: dict[str, Any] = dict(vars(run))
    gpu, logits_dtype, sac_blocks, trainable, lora_rank, lora_targets = (
        fields.pop(name)
        for name in ("gpu", "logits_dtype", "sac_blocks", "trainable", "lora_rank", "lora_targets")
    )
    positive = ("num_gpus", "micro_batch_size", "seq_length", "grad_accum_steps", "dp_replicate", "cp")
    for name in (*positive, "ep_size"):
        _check_integer(name, fields[name], 1)
    if fields["chunk_size"] is not None:
        _check_integer("chunk_size", fields["chunk_size"], 1)
    _check_integer("lora_rank", lora_rank, 0)
    if fields["num_gpus"] % fields["dp_replicate"]:
        raise ValueError(
            f"dp_replicate must divide num_gpus, got {fields['dp_replicate']} of {fields['num_gpus']}"
        )
    if fields["num_gpus"] % (fields["dp_replicate"] * fields["cp"]):
        raise ValueError(
            f"dp_replicate x cp must divide num_gpus, got {fields['dp_replicate']} x {fields['cp']} of "
            f"{fields['num_gpus']}"
        )
    if fields["ep_size"] > 1 and fields["cp"] > 1:
        raise ValueError(
            "ranks that share rows cannot share out experts: one of cp and ep_size has to be 1, got "
            f"{fields['cp']} and {fields['ep_size']}"
        )
    if fields["num_gpus"] % (fields["dp_replicate"] * fields["ep_size"]):
        raise ValueError(
            f"dp_replicate x ep_size must divide num_gpus, got {fields['dp_replicate']} x "
            f"{fields['ep_size']} of {fields['num_gpus']}"
        )
    _check_choice("loss_impl", fields["loss_impl"], get_args(LossImpl))
    _check_choice("optimizer", fields["optimizer"], get_args(Optimizer))
    _check_choice("experts_impl", fields["experts_impl"], get_args(ExpertsImpl))
    _check_choice("grad_sync", fields["grad_sync"], get_args(GradSync))
    for name in ("compile", "attention_mask", "reshard_after_forward", "cpu_offload", "sac_offload"):
        _check_choice(name, fields[name], (True, False))
    for name in ("master_dtype", "param_dtype", "reduce_dtype"):
        _check_choice(name, fields[name], _FLOATING)
    if fields["frozen_dtype"] is not None:
        _check_choice("frozen_dtype", fields["frozen_dtype"], _FLOATING)
    if logits_dtype is not None:
        _check_choice("logits_dtype", logits_dtype, _FLOATING)
    if fields["optimizer"] == "adamw_stochastic" and fields["master_dtype"] == torch.float16:
        raise ValueError(
            "StochasticAdamW rounds to bfloat16 or keeps float32, got master_dtype=torch.float16"
        )
    if lora_targets is not None and not lora_rank:
        raise ValueError(f"lora_targets={lora_targets!r} is for adapters: give lora_rank too")
    if sac_blocks is not None:
        if parse_ratio(fields["sac_ratio"]):
            raise ValueError("give sac_ratio or sac_blocks, and not both: each says which blocks recompute")
        sac_blocks = tuple(sac_blocks)
        for index in sac_blocks:
            _check_integer("each of sac_blocks", index, 0)
    if fields["frozen_dtype"] is None:
        fields["frozen_dtype"] = fields["param_dtype"] if lora_rank else fields["master_dtype"]
    select_block_indices(1, fields["sac_ratio"], placement=fields["sac_placement"])
    return Setup(
        gpu=gpu_named(gpu),
        logits_dtype=_logits_dtype(logits_dtype, **fields),
        sac_blocks=None if sac_blocks is None else tuple(sorted(set(sac_blocks))),
        trainable=_patterns("trainable", trainable),
        lora=(lora_rank, _patterns("lora_targets", lora_targets) or ("all-linear",)) if lora_rank else None,
        **fields,
    )


def _logits_dtype(
    given: torch.dtype | None, *, param_dtype: torch.dtype, loss_impl: LossImpl, cp: int, **_: Any
) -> torch.dtype:
    """The dtype of the cross entropy; where ranks share rows it is float32 at least."""
    if cp == 1:
        return param_dtype if given is None else given
    wide = torch.promote_types(param_dtype, torch.float32)
    if loss_impl == "logits" and given not in (None, wide):
        raise ValueError(
            f"with cp={cp} the loss of logits is computed in {wide}, got logits_dtype={given}: a plain loop "
            "does not know of rows that ranks share; leave it at None"
        )
    return wide


def _check_integer(name: str, value: Any, smallest: int) -> None:
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
