"""The description of a training run that the planner takes."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from fsdp_sft._process.gpus import Gpu, gpu_named
from fsdp_sft.sac import Placement, Ratio, parse_ratio, select_block_indices
from fsdp_sft.shard.packing import KINDS

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
_COUNTS = ("num_gpus", "micro_batch_size", "seq_length", "grad_accum_steps", "dp_replicate", "cp", "ep_size")
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "loss_impl": get_args(LossImpl),
    "optimizer": get_args(Optimizer),
    "grad_sync": get_args(GradSync),
    "sac_placement": get_args(Placement),
    **dict.fromkeys(("master_dtype", "param_dtype", "reduce_dtype"), _FLOATING),
    "frozen_dtype": (*_FLOATING, *KINDS, None),
    "logits_dtype": (*_FLOATING, None),
}


class _LoraLinear(nn.Module):
    """A frozen linear layer with a LoRA adapter."""

    weight = property(lambda self: self.base.weight)  # which some models read (DeepSeek's latent attention)
    bias = property(lambda self: self.base.bias)

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        place = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, **place)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, **place)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.lora_B(self.lora_A(x)) * 2.0


class Lora(NamedTuple):
    """Adapters of linear layers, of one rank.

    Attributes:
        rank: Their rank.
        targets: Names of the layers; ``"all-linear"`` stands for all in the blocks.
    """

    rank: int
    targets: tuple[str, ...]

    @property
    def code(self) -> str:
        """The adapters as peft's configuration, in code."""
        targets = "'all-linear'" if "all-linear" in self.targets else list(self.targets)
        return f"peft.LoraConfig(r={self.rank}, target_modules={targets}, task_type='CAUSAL_LM')"

    def adapt(self, blocks: Sequence[nn.Module]) -> tuple[str, ...]:
        """Add adapters to the layers of the blocks; returns the names of those layers."""
        chosen = [
            (block.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], module)
            for block in blocks
            for name, module in block.named_modules()
            # A subclass with a forward of its own (DeepSeek-V4's groups of heads) is no layer for adapters.
            if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
            if name.rpartition(".")[2] in self.targets or "all-linear" in self.targets
        ]
        if not chosen:
            raise ValueError(f"lora_targets={self.targets!r} names no linear layer of the blocks")
        for parent, name, module in chosen:
            setattr(parent, name, _LoraLinear(module, self.rank))
        return tuple(dict.fromkeys(name for _, name, _ in chosen))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train a model, for ``estimate_memory``.

    Fields are checked when a run is made; its ratio becomes a ``Fraction``, and what is iterated a tuple.

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
        optimizer: ``"adamw"`` (as torch runs it by default: ``foreach`` on a GPU, a loop on a CPU),
            ``"adamw_foreach"``, ``"adamw_fused"``, ``"adamw_for_loop"``, ``"adamw_stochastic"``
            (``StochasticAdamW``), ``"adamw8bit"``, ``"sgd"``, ``"sgd_momentum"``.
        grad_sync: When gradients are reduced: after ``"each"`` micro-batch, or only after the ``"last"``,
            with unsharded gradients kept until then.
        reshard_after_forward: Whether blocks are freed between their forward and their backward; False keeps
            them gathered (ZeRO-2).
        lora_rank: Rank of LoRA adapters. Above 0 all other parameters are frozen.
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
            is what the loss does after ``prepare_loss(model, impl="logits")``, and with ``cp > 1`` any loss.
        ep_size: Ranks over which the experts of a layer are distributed (``shard_model(ep_size=)``);
            ``dp_replicate * ep_size`` divides ``num_gpus``, and ``ep_size`` the number of experts. The
            estimate assumes that each rank gets as many tokens as it sends.

    Raises:
        ValueError: For a field out of range, or fields that contradict each other.

    Example:
        >>> from dataclasses import replace
        >>> run = fs.Run(num_gpus=8, micro_batch_size=1, seq_length=4096, sac_ratio="1/3")
        >>> replace(run, seq_length=8192).sac_ratio
        Fraction(1, 3)
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
    gpu: str | Gpu = "h100"
    grad_accum_steps: int = 1
    dp_replicate: int = 1
    cp: int = 1
    optimizer: Optimizer = "adamw"
    grad_sync: GradSync = "each"
    reshard_after_forward: bool = True
    lora_rank: int = 0
    lora_targets: str | Iterable[str] | None = None
    frozen_dtype: torch.dtype | Literal["stored", "nf4", "fp8"] | None = None
    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    logits_dtype: torch.dtype | None = None
    ep_size: int = 1

    def __post_init__(self) -> None:
        """Check all that can be checked without the model, and bring values into one form."""
        for name in _COUNTS:
            check_integer(name, getattr(self, name), 1)
        check_integer("lora_rank", self.lora_rank, 0)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}"
                )
        if self.ep_size > 1 and self.cp > 1:
            raise ValueError(
                "ranks that share rows cannot share out experts: one of cp and ep_size has to be 1, got "
                f"{self.cp} and {self.ep_size}"
            )
        if self.num_gpus % (self.dp_replicate * self.exchange_ranks):
            raise ValueError(
                f"dp_replicate x cp x ep_size must divide num_gpus, got {self.dp_replicate} x {self.cp} x "
                f"{self.ep_size} of {self.num_gpus}"
            )
        if self.lora_targets is not None and not self.lora_rank:
            raise ValueError(f"lora_targets={self.lora_targets!r} is for adapters: give lora_rank too")
        object.__setattr__(self, "sac_ratio", parse_ratio(self.sac_ratio))
        targets = self.lora_targets
        targets = (targets,) if isinstance(targets, str) else targets and tuple(targets)
        object.__setattr__(self, "lora_targets", targets)

    @functools.cached_property
    def device(self) -> Gpu:
        """The GPU that ``gpu`` names."""
        return self.gpu if isinstance(self.gpu, Gpu) else gpu_named(self.gpu)

    @property
    def lora(self) -> Lora | None:
        """The adapters that are trained in place of the model."""
        return Lora(self.lora_rank, tuple(self.lora_targets or ("all-linear",))) if self.lora_rank else None

    def naming(self, adapted: tuple[str, ...]) -> "Run":
        """The run with the layers that its adapters are in as targets, if it names none."""
        return replace(self, lora_targets=adapted) if self.lora and self.lora_targets is None else self

    @property
    def packed(self) -> str | None:
        """How frozen matrices of blocks are kept packed, such as ``"nf4"``; None: not at all."""
        return self.frozen_dtype if isinstance(self.frozen_dtype, str) else None

    def kept_dtype(self) -> torch.dtype:
        """Dtype of the shards of what is frozen and not packed."""
        if isinstance(self.frozen_dtype, torch.dtype):
            return self.frozen_dtype
        return self.param_dtype if self.packed or self.lora_rank else self.master_dtype

    @property
    def shares_rows(self) -> bool:
        """Whether ranks share the tokens of a row."""
        return self.cp > 1

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or of groups of ranks that share rows, which have rows of their own."""
        return self.num_gpus // self.cp

    @property
    def exchange_ranks(self) -> int:
        """Number of ranks among which activations travel, around attention or experts; 1: nothing travels."""
        return self.cp * self.ep_size

    @property
    def is_made_in_steps(self) -> bool:
        """Whether the model is made by the steps of ``load_pretrained``, which has no ``ep_size``."""
        return self.ep_size > 1

    @property
    def num_shards(self) -> int:
        """Number of ranks that a parameter is sharded over."""
        return self.num_gpus // self.dp_replicate

    @functools.lru_cache(maxsize=256)  # noqa: B019  runs are few and small
    def checkpointed(self, num_blocks: int) -> frozenset[int]:
        """Indices of the blocks that are recomputed in the backward."""
        return frozenset(
            select_block_indices(num_blocks, parse_ratio(self.sac_ratio), placement=self.sac_placement)
        )


def check_integer(name: str, value: Any, smallest: int) -> None:
    """Raise a ValueError unless a value is an integer of at least ``smallest``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"{name} must be an integer of at least {smallest}, got {value!r}")
