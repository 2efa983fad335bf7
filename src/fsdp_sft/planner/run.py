"""The description of a training run that the planner takes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch

from fsdp_sft.planner.experts import ExpertsImpl
from fsdp_sft.sac import Placement, Ratio

LossImpl = Literal["chunked", "logits"]
Optimizer = Literal[
    "adamw",
    "adamw_foreach",
    "adamw_fused",
    "adamw_for_loop",
    "adamw_stochastic",
    "adamw8bit",
    "sgd",
    "sgd_momentum",
]
GradSync = Literal["each", "last"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train a model, for ``estimate_memory``.

    Attributes:
        num_gpus: Number of ranks, >= 1.
        micro_batch_size: Sequences per rank and forward.
        seq_length: Tokens per sequence, padding included.
        sac_ratio: Fraction of blocks that are checkpointed, as for ``apply_sac``.
        sac_placement: ``"even"`` or ``"prefix"``.
        compile: Whether the blocks are compiled (``compile_blocks``).
        master_dtype: Dtype of the stored shards, hence of gradients and optimizer states.
        loss_impl: ``"chunked"``, or ``"logits"`` for all logits at once.
        attention_mask: Whether batches are padded, so that attention gets a mask.
        gpu: The GPU, which decides the attention kernels and the speed: ``"h100"``, ``"4090"``, ``"mi300x"``
            and others (an unknown name raises with the list), one with another memory size such as
            ``"a100-40gb"``, or any GPU described as ``"NAME=GiB,TFLOPs,GB/s"``.
        grad_accum_steps: Micro-batches per optimizer step.
        dp_replicate: Replicas of the sharded model (HSDP); divides ``num_gpus``.
        cp: Ranks that share the tokens of each row (``use_context_parallel``); ``dp_replicate * cp`` divides
            ``num_gpus``, and ``cp`` the query heads. Parameters are sharded over them as well.
        sac_blocks: Indices of the checkpointed blocks, instead of ratio and placement.
        optimizer: ``"adamw"`` (as torch runs it by default: ``foreach`` on a GPU, a loop on a CPU),
            ``"adamw_foreach"``, ``"adamw_fused"``, ``"adamw_for_loop"``, ``"adamw_stochastic"``
            (``StochasticAdamW``), ``"adamw8bit"``, ``"sgd"``, ``"sgd_momentum"``.
        grad_sync: When gradients are reduced: after ``"each"`` micro-batch, or only after the ``"last"``,
            with unsharded gradients kept until then.
        reshard_after_forward: Whether blocks are freed between their forward and their backward; False keeps
            them gathered (ZeRO-2).
        cpu_offload: Whether shards, gradients and optimizer states are in host memory, which is not counted.
        sac_offload: Whether what checkpointed blocks keep is offloaded: ``apply_sac(offload=True)``.
        trainable: Regular expressions for the names of trained parameters; None trains all.
        lora_rank: Rank of LoRA adapters. Above 0 all other parameters are frozen, except ``trainable``.
        lora_targets: Names of linear layers to adapt, such as ``["q_proj", "v_proj"]``; None takes all in the
            blocks.
        frozen_dtype: Dtype of frozen shards; None is ``param_dtype`` with LoRA and for the towers of a
            vision-language model, and ``master_dtype`` without. ``"nf4"`` and ``"fp8"`` pack the matrices of
            blocks, and ``"stored"`` keeps them as a quantised checkpoint has them, as far as its config says
            how; what else is frozen has ``param_dtype`` then.
        param_dtype: Dtype of the computation.
        reduce_dtype: Dtype of the gradients' reduction.
        logits_dtype: Dtype of the cross entropy with ``loss_impl="logits"``. None is ``param_dtype``: a plain
            loop that gives the model's logits to ``F.cross_entropy`` and holds on to them. ``torch.float32``
            is what ``causal_lm_loss(impl="logits")`` does; ``cp > 1`` allows nothing else.
        chunk_size: Tokens per chunk of the chunked loss, as for ``linear_cross_entropy_sum``.
        experts_impl: How experts are computed, as for ``prepare_experts``: ``"grouped_mm"``, or ``"eager"``,
            whose backward holds a gradient of all of a layer's experts for each of them in turn.
        ep_size: Ranks over which the experts of a layer are distributed (``shard_model(ep_size=)``);
            ``dp_replicate * ep_size`` divides ``num_gpus``, and ``ep_size`` the number of experts. The
            estimate assumes that each rank gets as many tokens as it sends.

    Example:
        >>> from dataclasses import replace
        >>> run = fs.Run(num_gpus=8, micro_batch_size=1, seq_length=4096, sac_ratio="1/3")
        >>> replace(run, seq_length=8192).sac_ratio
        '1/3'
    """

    num_gpus: int
    micro_batch_size: int
    seq_length: int
    sac_ratio: Ratio = 0
    sac_placement: Placement = "even"
    compile: bool = False  # as load_pretrained calls it
    master_dtype: torch.dtype = torch.float32
    loss_impl: LossImpl = "chunked"
    attention_mask: bool = True
    gpu: str = "h100"
    grad_accum_steps: int = 1
    dp_replicate: int = 1
    cp: int = 1
    sac_blocks: Iterable[int] | None = None
    optimizer: Optimizer = "adamw"
    grad_sync: GradSync = "each"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    sac_offload: bool = False
    trainable: str | Iterable[str] | None = None
    lora_rank: int = 0
    lora_targets: str | Iterable[str] | None = None
    frozen_dtype: torch.dtype | Literal["stored", "nf4", "fp8"] | None = None
    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    logits_dtype: torch.dtype | None = None
    chunk_size: int | None = None
    experts_impl: ExpertsImpl = "grouped_mm"
    ep_size: int = 1

    def __post_init__(self) -> None:
        """Turn iterators into tuples, since a run is read more than once."""
        for name in ("sac_blocks", "trainable", "lora_targets"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))


class RunKeywords(TypedDict, total=False):
    """The fields of ``Run`` that a search of plans takes as keywords; a test holds them against ``Run``."""

    micro_batch_size: int
    sac_ratio: Ratio
    sac_placement: Placement
    compile: bool
    master_dtype: torch.dtype
    loss_impl: LossImpl
    attention_mask: bool
    gpu: str
    grad_accum_steps: int
    dp_replicate: int
    cp: int
    sac_blocks: Iterable[int] | None
    optimizer: Optimizer
    grad_sync: GradSync
    reshard_after_forward: bool
    cpu_offload: bool
    sac_offload: bool
    trainable: str | Iterable[str] | None
    lora_rank: int
    lora_targets: str | Iterable[str] | None
    frozen_dtype: torch.dtype | Literal["stored", "nf4", "fp8"] | None
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    logits_dtype: torch.dtype | None
    chunk_size: int | None
    experts_impl: ExpertsImpl
    ep_size: int
