"""A way to train: its predicted memory and speed, and the code for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from fsdp_sft._process.gpus import GIB
from fsdp_sft.planner.estimate import MemoryEstimate
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.speed import StepTime

TIGHT = Fraction(1, 20)
"""Share of the usable memory below which a plan is tight."""
_CHOSEN = (
    *("num_gpus", "cp", "ep_size", "dp_replicate", "micro_batch_size", "grad_accum_steps", "grad_sync"),
    *("sac_placement", "sac_offload", "reshard_after_forward", "compile", "optimizer"),
)


@dataclass(frozen=True, repr=False)
class RunPlan:
    """A way to train that fits into memory.

    Attributes:
        run: All fields of the run: ``run.micro_batch_size``, ``run.grad_accum_steps``, ``run.sac_ratio`` (the
            smallest of a fixed list that fits), ``run.reshard_after_forward`` and the rest.
        estimate: Memory per GPU.
        time: Predicted seconds of an optimizer step, by part.
        usable_bytes: Memory of a GPU that tensors can have.
        relative_speed: Speed relative to the first plan, which has 1.0.
    """

    run: Run
    estimate: MemoryEstimate
    time: StepTime
    usable_bytes: int
    relative_speed: float = 1.0

    @property
    def peak_bytes(self) -> int:
        """Predicted peak per GPU, in bytes."""
        return self.estimate.peak_bytes

    @property
    def left_bytes(self) -> int:
        """What the predicted peak leaves of the usable memory."""
        return self.usable_bytes - self.peak_bytes

    @property
    def is_tight(self) -> bool:
        """Whether less than 5 % of the usable memory is left: the estimate is not surer than that."""
        return self.left_bytes < TIGHT * self.usable_bytes

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens per second of one GPU."""
        run = self.run
        return run.grad_accum_steps * run.micro_batch_size * run.seq_length / run.cp / self.time.total

    @property
    def reasons(self) -> tuple[str, ...]:
        """What determines the speed, in sentences."""
        return tuple(_reasons(self.run, self.time, self.estimate.host_bytes))

    def __repr__(self) -> str:
        run = self.run
        share = "none" if not run.sac_ratio else f"{run.sac_ratio} {run.sac_placement}"
        return (
            f"<RunPlan: {run.num_gpus} x {run.device.name}, micro batch {run.micro_batch_size} x "
            f"{run.grad_accum_steps}, {share} checkpointed, {self.peak_bytes / GIB:.1f} GiB "
            f"({self.left_bytes / GIB:.1f} left), {self.time.total:.3g} s a step>"
        )

    def code(self, model: str = "MODEL") -> str:
        """The calls of this library with this plan's arguments, to paste into a training script."""
        return "\n".join(_code(self.run, model))

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON types: memory in bytes, times in seconds, speed of one GPU."""
        return {
            **{name: getattr(self.run, name) for name in _CHOSEN},
            "sac_ratio": str(self.run.sac_ratio),
            "frozen_dtype": self.run.packed or str(self.run.kept_dtype()).removeprefix("torch."),
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.estimate.peak_phase,
            "breakdown_bytes": dict(self.estimate.breakdown),
            "host_bytes": self.estimate.host_bytes,
            "left_bytes": self.left_bytes,
            "tight": self.is_tight,
            "step_seconds": self.time.total,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "relative_speed": self.relative_speed,
            "bound_by": self.time.bound,
            "reasons": list(self.reasons),
            "notes": list(self.estimate.notes),
        }


def _reasons(run: Run, time: StepTime, host_bytes: int) -> Iterator[str]:
    """Sentences about a plan's speed."""
    hidden = f"which costs {time.exposed:.2f} s" if time.exposed > 0.005 else "all of it hidden"
    yield (
        f"bound by {time.bound} (a micro-step: compute {time.compute:.2f} s, {time.memory_bound:.2f} s of it "
        f"waiting for memory; communication {time.communication:.2f} s, {hidden})"
    )
    if time.recompute:
        yield f"recomputation is {time.recompute / time.compute:.0%} of the compute"
    if run.packed is not None:
        yield (
            f"values of the packed weights are computed in each gather, in {time.decoding:.2f} s of the "
            "compute"
        )
    if host_bytes:
        what = "shards, gradients and states" if run.cpu_offload else "what checkpointed blocks keep"
        yield (
            f"{what}: {host_bytes / GIB:.1f} GiB of host memory per GPU, whose copies take "
            f"{time.offload:.2f} s of a micro-step beside the compute"
        )
    if time.exchange:
        what = "share each row" if run.cp > 1 else "share out the experts of each layer"
        yield f"{run.cp * run.ep_size} GPUs {what}: exchanges take {time.exchange:.2f} s of a micro-step"


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


def _code(run: Run, model: str) -> Iterator[str]:
    """Lines of code that run a plan."""
    if run.lora_rank:
        yield "import peft"
    if run.optimizer == "adamw8bit":
        yield "import torchao.optim"
    yield "fs.init_distributed()"
    yield f"mesh = fs.build_mesh({_arguments({'dp_replicate': (run.dp_replicate, 1), 'cp': (run.cp, 1)})})"
    yield from _model(run, model)
    if run.cp > 1:
        yield "fs.use_context_parallel(model, mesh=mesh)"
    if run.experts_impl != "grouped_mm":
        yield f"fs.prepare_experts(model, impl={run.experts_impl!r})"
    if run.loss_impl == "logits":
        yield "fs.prepare_loss(model, impl='logits')"
    yield f"optimizer = {_OPTIMIZERS[run.optimizer]}"
    sampler = "sampler=fs.ResumableSampler(rows)"
    yield f"loader = DataLoader(rows, {run.micro_batch_size}, {sampler}, collate_fn=...)"
    yield f"for window in fs.windows(loader, grad_accum_steps={run.grad_accum_steps}):"
    step = _call("model", "window", "optimizer", _arguments({"grad_sync": (run.grad_sync, "each")}))
    yield f"    fs.train_step({step})"


def _model(run: Run, name: str) -> Iterator[str]:
    """Lines of code that make the model: ``load_pretrained``, or its steps if it lacks an argument."""
    recomputes = bool(run.sac_ratio) or run.sac_blocks is not None
    policy = f"MixedPrecisionPolicy(param_dtype={run.param_dtype}, reduce_dtype={run.reduce_dtype})"
    is_usual = (run.param_dtype, run.reduce_dtype) == (torch.bfloat16, torch.float32)
    targets = run.lora_targets or ("all-linear",)
    chosen = repr("all-linear" if "all-linear" in targets else list(targets))
    lora = f"peft.LoraConfig(r={run.lora_rank}, target_modules={chosen}, task_type='CAUSAL_LM')"
    shard: dict[str, tuple[Any, Any]] = {
        "reshard_after_forward": (run.reshard_after_forward, True),
        "master_dtype": (run.master_dtype, torch.float32),
        "mp_policy": (None if is_usual else _Verbatim(f"torch.distributed.fsdp.{policy}"), None),
    }
    offload = _Verbatim("torch.distributed.fsdp.CPUOffloadPolicy()")
    steps: dict[str, tuple[Any, Any]] = {
        "offload_policy": (offload if run.cpu_offload else None, None),
        "ep_size": (run.ep_size, 1),
    }
    sac: dict[str, tuple[Any, Any]] = {
        "blocks": (None if run.sac_blocks is None else list(run.sac_blocks), None),
        "placement": (run.sac_placement if run.sac_ratio else "even", "even"),
        "offload": (run.sac_offload and recomputes, False),
    }
    ratio = "" if run.sac_blocks is not None else repr(str(run.sac_ratio))
    apply_sac = f"fs.apply_sac({_call('model', ratio, _arguments(sac))})"
    frozen = run.packed or run.kept_dtype()
    if not _arguments(steps) and run.trainable is None:
        all_at_once = {
            "sac_ratio": ("0" if _arguments(sac) else str(run.sac_ratio), "0"),
            "compile": (run.compile, False),
            **shard,
            "peft_config": (_Verbatim(lora) if run.lora_rank else None, None),
            "frozen_dtype": (frozen, run.param_dtype if run.lora_rank else run.master_dtype),
        }
        yield f"model = fs.load_pretrained({_call(repr(name), 'mesh=mesh', _arguments(all_at_once))})"
        if _arguments(sac):
            yield apply_sac
        return
    dtype = _arguments({"dtype": (run.master_dtype, torch.float32)})
    yield f"model = fs.build_meta_model({_call(repr(name), dtype)})"
    if run.lora_rank:
        yield f"model = fs.add_adapters(model, {lora})"
    if run.trainable is not None:
        yield f"# Here: freeze all parameters but those that match {list(run.trainable)}"
    if recomputes:
        yield apply_sac
    if run.compile:
        yield "fs.compile_blocks(model)"
    kept = {"frozen_dtype": (frozen, None if run.lora_rank else run.master_dtype)}
    yield f"fs.shard_model({_call('model', 'mesh=mesh', _arguments({**shard, **kept, **steps}))})"
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
