"""A way to train: its predicted memory and speed, and the code for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from fsdp_sft.planner.estimate import MemoryEstimate
from fsdp_sft.planner.setup import GradSync, Setup
from fsdp_sft.planner.speed import StepTime
from fsdp_sft.sac import Placement

TIGHT = Fraction(1, 20)
"""Share of the usable memory below which a plan is tight."""
_GIB = 1 << 30


@dataclass(frozen=True, repr=False)
class RunPlan:
    """A way to train that fits into memory.

    Attributes:
        num_gpus: Number of ranks.
        cp: Number of ranks that share the tokens of each row; the ``num_gpus // cp`` groups have different
            rows.
        ep_size: Number of ranks over which the experts of each layer are distributed.
        dp_replicate: Replicas of the sharded model (HSDP).
        micro_batch_size: Sequences per rank (or group of ``cp`` ranks) and forward.
        grad_accum_steps: Micro-batches per optimizer step.
        grad_sync: When gradients are reduced: after ``"each"`` micro-batch, or only after the ``"last"``.
        sac_ratio: Fraction of checkpointed blocks: the smallest of a fixed list that fits.
        sac_placement: Placement of the checkpointed blocks: ``"even"`` or ``"prefix"``.
        sac_offload: Whether what checkpointed blocks keep is offloaded to the host, where it takes
            ``estimate.host_bytes``.
        reshard_after_forward: Whether blocks are freed between forward and backward.
        compile: Whether the blocks are compiled.
        estimate: Memory per GPU.
        time: Predicted seconds of an optimizer step, by part.
        tokens_per_second: Predicted tokens per second of one GPU.
        relative_speed: Speed relative to the fastest plan, which has 1.0.
        reasons: What determines the speed, in sentences.
        setup: All arguments of the estimate.
        usable_bytes: Memory of a GPU that tensors can have.
    """

    num_gpus: int
    cp: int
    ep_size: int
    dp_replicate: int
    micro_batch_size: int
    grad_accum_steps: int
    grad_sync: GradSync
    sac_ratio: Fraction
    sac_placement: Placement
    sac_offload: bool
    reshard_after_forward: bool
    compile: bool
    estimate: MemoryEstimate
    time: StepTime
    tokens_per_second: float
    relative_speed: float
    reasons: tuple[str, ...]
    setup: Setup
    usable_bytes: int

    @property
    def left_bytes(self) -> int:
        """What the predicted peak leaves of the usable memory."""
        return self.usable_bytes - self.peak_bytes

    @property
    def is_tight(self) -> bool:
        """Whether less than 5 % of the usable memory is left: the estimate is not surer than that."""
        return self.left_bytes < TIGHT * self.usable_bytes

    @property
    def peak_bytes(self) -> int:
        """Predicted peak per GPU, in bytes."""
        return self.estimate.peak_bytes

    def __repr__(self) -> str:
        share = "none" if not self.sac_ratio else f"{self.sac_ratio} {self.sac_placement}"
        return (
            f"<RunPlan: {self.num_gpus} x {self.setup.gpu}, micro batch {self.micro_batch_size} x "
            f"{self.grad_accum_steps}, {share} checkpointed, {self.peak_bytes / _GIB:.1f} GiB "
            f"({self.left_bytes / _GIB:.1f} left), {self.time.total:.3g} s a step>"
        )

    def code(self, model: str = "MODEL") -> str:
        """The calls of this library with this plan's arguments, to paste into a training script."""
        return "\n".join(_code(self, model))

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON types: memory in bytes, times in seconds, speed of one GPU."""
        return {
            "num_gpus": self.num_gpus,
            "cp": self.cp,
            "ep_size": self.ep_size,
            "dp_replicate": self.dp_replicate,
            "micro_batch_size": self.micro_batch_size,
            "grad_accum_steps": self.grad_accum_steps,
            "grad_sync": self.grad_sync,
            "sac_ratio": str(self.sac_ratio),
            "sac_placement": self.sac_placement,
            "sac_offload": self.sac_offload,
            "reshard_after_forward": self.reshard_after_forward,
            "compile": self.compile,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.estimate.peak_phase,
            "breakdown_bytes": dict(self.estimate.breakdown),
            "host_bytes": self.estimate.host_bytes,
            "left_bytes": self.left_bytes,
            "tight": self.is_tight,
            "optimizer": self.setup.optimizer,
            "frozen_dtype": self.setup.packed or str(self.setup.frozen_dtype).removeprefix("torch."),
            "step_seconds": self.time.total,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "relative_speed": self.relative_speed,
            "bound_by": self.time.bound,
            "reasons": list(self.reasons),
            "notes": list(self.estimate.notes),
        }


def make_plan(setup: Setup, memory: MemoryEstimate, time: StepTime, usable_bytes: int) -> RunPlan:
    """The plan of a setup."""
    tokens = setup.grad_accum_steps * setup.micro_batch_size * setup.seq_length / setup.cp
    return RunPlan(
        num_gpus=setup.num_gpus,
        cp=setup.cp,
        ep_size=setup.ep_size,
        dp_replicate=setup.dp_replicate,
        micro_batch_size=setup.micro_batch_size,
        grad_accum_steps=setup.grad_accum_steps,
        grad_sync=setup.grad_sync,
        sac_ratio=setup.sac_ratio,
        sac_placement=setup.sac_placement,
        sac_offload=setup.sac_offload,
        reshard_after_forward=setup.reshard_after_forward,
        compile=setup.compile,
        estimate=memory,
        time=time,
        tokens_per_second=tokens / time.total,
        relative_speed=1.0,
        reasons=tuple(_reasons(setup, time, memory.host_bytes)),
        setup=setup,
        usable_bytes=usable_bytes,
    )


def _reasons(setup: Setup, time: StepTime, host_bytes: int) -> Iterator[str]:
    """Sentences about the plan's speed."""
    hidden = f"which costs {time.exposed:.2f} s" if time.exposed > 0.005 else "all of it hidden"
    yield (
        f"bound by {time.bound} (a micro-step: compute {time.compute:.2f} s, {time.memory_bound:.2f} s of it "
        f"waiting for memory; communication {time.communication:.2f} s, {hidden})"
    )
    if time.recompute:
        yield f"recomputation is {time.recompute / time.compute:.0%} of the compute"
    if setup.packed is not None:
        yield (
            f"values of the packed weights are computed in each gather, in {time.decoding:.2f} s of the "
            "compute"
        )
    if host_bytes and not setup.cpu_offload:
        yield (
            f"what checkpointed blocks keep waits in {host_bytes / _GIB:.1f} GiB of host memory per GPU: "
            f"copies take {time.offload:.2f} s of a micro-step, beside the compute"
        )
    elif setup.cpu_offload:
        yield (
            f"shards, gradients and states take {host_bytes / _GIB:.1f} GiB of host memory per GPU: copies "
            f"take {time.offload:.2f} s of a micro-step, beside the compute, and the update "
            f"{time.optimizer:.2f} s"
        )
    if setup.cp > 1:
        yield f"{setup.cp} GPUs share each row: exchanges take {time.exchange:.2f} s of a micro-step"
    if setup.ep_size > 1:
        yield (
            f"{setup.ep_size} GPUs share out the experts of each layer: exchanges of tokens take "
            f"{time.exchange:.2f} s of a micro-step, if experts are given alike"
        )
    if setup.dp_replicate > 1:
        yield f"{setup.dp_replicate} replicas of {setup.num_shards} GPUs each: gathers stay within them"
    if setup.grad_sync == "last" and setup.grad_accum_steps > 1:
        yield "gradients are reduced once a step: whole ones are kept until then"
    if setup.optimizer == "adamw_fused":
        yield "AdamW is fused: its update makes no copies"
    if not setup.reshard_after_forward:
        yield "blocks stay gathered: one all-gather less"


_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=...)",
    "adamw_foreach": "torch.optim.AdamW(model.parameters(), lr=..., foreach=True)",
    "adamw_fused": "torch.optim.AdamW(model.parameters(), lr=..., fused=True)",
    "adamw_for_loop": "torch.optim.AdamW(model.parameters(), lr=..., foreach=False)",
    "adamw_stochastic": "fs.StochasticAdamW(model.parameters(), lr=...)",
    "adamw8bit": "torchao.optim.AdamW8bit(model.parameters(), lr=...)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=...)",
    "sgd_momentum": "torch.optim.SGD(model.parameters(), lr=..., momentum=...)",
}


def _mp_policy(setup: Setup) -> "_Verbatim | None":
    """The ``mp_policy`` argument; None for the default of ``shard_model``, bfloat16 reduced in float32."""
    if (setup.param_dtype, setup.reduce_dtype) == (torch.bfloat16, torch.float32):
        return None
    dtypes = f"param_dtype={setup.param_dtype}, reduce_dtype={setup.reduce_dtype}"
    return _Verbatim(f"torch.distributed.fsdp.MixedPrecisionPolicy({dtypes})")


def _code(plan: RunPlan, model: str) -> Iterator[str]:
    """Lines of code that run the plan."""
    setup = plan.setup
    mesh = {"dp_replicate": (plan.dp_replicate, 1), "cp": (plan.cp, 1)}
    if setup.lora is not None:
        yield "import peft"
    if setup.optimizer == "adamw8bit":
        yield "import torchao.optim"
    yield "fs.init_distributed()"
    yield f"mesh = fs.build_mesh({_arguments(mesh)})"
    yield from _model(plan, model)
    if setup.chunk_size is not None and setup.loss_impl == "chunked":
        yield f"# Estimated for chunk_size={setup.chunk_size}, where train_step chooses its own"
    if plan.cp > 1:
        yield "fs.use_context_parallel(model, mesh=mesh)"
    if setup.experts_impl != "grouped_mm":
        yield f"fs.prepare_experts(model, impl={setup.experts_impl!r})"
    yield from ["fs.prepare_loss(model, impl='logits')"] * (setup.loss_impl == "logits")
    yield f"optimizer = {_OPTIMIZERS[setup.optimizer]}"
    sampler = "sampler=fs.ResumableSampler(rows)"
    yield f"loader = DataLoader(rows, {plan.micro_batch_size}, {sampler}, collate_fn=...)"
    yield f"for window in fs.windows(loader, grad_accum_steps={plan.grad_accum_steps}):"
    step = _call("model", "window", "optimizer", _arguments({"grad_sync": (plan.grad_sync, "each")}))
    yield f"    fs.train_step({step})"


def _model(plan: RunPlan, name: str) -> Iterator[str]:
    """Lines of code that make the model: ``load_pretrained``, or its steps if it lacks an argument."""
    setup = plan.setup
    offload = _Verbatim("torch.distributed.fsdp.CPUOffloadPolicy()") if setup.cpu_offload else None
    peft: _Verbatim | None = None
    if setup.lora is not None:
        rank, targets = setup.lora
        chosen = "all-linear" if "all-linear" in targets else list(targets)
        peft = _Verbatim(f"peft.LoraConfig(r={rank}, target_modules={chosen!r}, task_type='CAUSAL_LM')")
    kept_frozen = setup.param_dtype if peft else setup.master_dtype
    shard: dict[str, tuple[Any, Any]] = {
        "reshard_after_forward": (plan.reshard_after_forward, True),
        "master_dtype": (setup.master_dtype, torch.float32),
        "mp_policy": (_mp_policy(setup), None),
    }
    sac: dict[str, tuple[Any, Any]] = {
        "blocks": (None if setup.sac_blocks is None else list(setup.sac_blocks), None),
        "placement": (plan.sac_placement if plan.sac_ratio else "even", "even"),
        "offload": (setup.sac_offload and bool(plan.sac_ratio or setup.sac_blocks), False),
    }
    parts: dict[str, tuple[Any, Any]] = {
        "offload_policy": (offload, None),
        "ep_size": (plan.ep_size, 1),
    }
    ratio = "" if setup.sac_blocks is not None else repr(str(plan.sac_ratio))
    apply_sac = f"fs.apply_sac({_call('model', ratio, _arguments(sac))})"
    if not _arguments(parts) and setup.trainable is None:
        one = {
            "sac_ratio": ("0" if _arguments(sac) else str(plan.sac_ratio), "0"),
            "compile": (plan.compile, False),
            **shard,
            "peft_config": (peft, None),
            "frozen_dtype": (setup.packed or setup.frozen_dtype, kept_frozen),
        }
        yield f"model = fs.load_pretrained({_call(repr(name), 'mesh=mesh', _arguments(one))})"
        if _arguments(sac):
            yield apply_sac
        return
    dtype = _arguments({"dtype": (setup.master_dtype, torch.float32)})
    yield f"model = fs.build_meta_model({_call(repr(name), dtype)})"
    if peft is not None:
        yield f"model = fs.add_adapters(model, {peft})"
    if setup.trainable is not None:
        yield f"# Here: freeze all parameters but those that match {list(setup.trainable)}"
    if plan.sac_ratio or setup.sac_blocks is not None:
        yield apply_sac
    if plan.compile:
        yield "fs.compile_blocks(model)"
    frozen = {"frozen_dtype": (setup.packed or setup.frozen_dtype, None if peft else setup.master_dtype)}
    yield f"fs.shard_model({_call('model', 'mesh=mesh', _arguments({**shard, **frozen, **parts}))})"
    yield f"fs.load_weights(model, {name!r})"


def _call(*arguments: str) -> str:
    """Arguments as code, without empty ones."""
    return ", ".join(filter(None, arguments))


class _Verbatim(str):
    """Code that is written into an argument without the quotes of a string."""

    __slots__ = ()
    __repr__ = str.__str__


def _arguments(values: dict[str, tuple[Any, Any]]) -> str:
    """Keyword arguments as code, without those that have the usual value; ``values`` holds both."""
    return ", ".join(f"{name}={value!r}" for name, (value, usual) in values.items() if value != usual)
