"""A way to train: its predicted memory and speed, and the code for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from fsdp_sft.planner.estimate import MemoryEstimate
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.speed import StepTime

TIGHT = Fraction(1, 20)
"""Share of the usable memory below which a plan is tight."""
_CHOSEN = (
    *("num_gpus", "cp", "ep_size", "dp_replicate", "micro_batch_size", "grad_accum_steps", "grad_sync"),
    *("sac_placement", "reshard_after_forward", "compile", "optimizer"),
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
        attention: What transformers chooses for the model: ``"sdpa"``, or ``"eager"`` for what has no other.
    """

    run: Run
    estimate: MemoryEstimate
    time: StepTime
    usable_bytes: int
    relative_speed: float = 1.0
    attention: str = "sdpa"

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
        return (
            self.run.grad_accum_steps
            * self.run.micro_batch_size
            * self.run.seq_length
            * self.run.data_ranks
            / (self.run.num_gpus * self.time.total)
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """What determines the speed, in sentences."""
        run, time = self.run, self.time
        hidden = f"which costs {time.exposed:.2f} s" if time.exposed > 0.005 else "all of it hidden"
        bound = (
            f"bound by {time.bound} (a micro-step: compute {time.compute:.2f} s, {time.memory_bound:.2f} s "
            f"of it waiting for memory; communication {time.communication:.2f} s, {hidden})"
        )
        others = {
            f"recomputation is {time.recompute / time.compute:.0%} of the compute": time.recompute,
            f"exchanges of {run.exchange_ranks} GPUs take {time.exchange:.2f} s "
            "of a micro-step": time.exchange,
        }
        return bound, *(sentence for sentence, seconds in others.items() if seconds)

    def __repr__(self) -> str:
        run = self.run
        return (
            f"<RunPlan: {run.num_gpus} x {run.device.name}, micro batch {run.micro_batch_size} x "
            f"{run.grad_accum_steps}, {run.sac_ratio or 'none'} checkpointed, "
            f"{self.peak_bytes / 2**30:.1f} GiB ({self.left_bytes / 2**30:.1f} left), "
            f"{self.time.total:.3g} s a step>"
        )

    def code(self, model: str = "MODEL") -> str:
        """The calls of this library with this plan's arguments, for a training script; fill in ``...``."""
        return "\n".join(_code(self.run, model, has_varlen=self.attention == "sdpa"))

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON types: memory in bytes, times in seconds, speed of one GPU."""
        return {
            **{name: getattr(self.run, name) for name in _CHOSEN},
            "sac_ratio": str(self.run.sac_ratio),
            "frozen_dtype": self.run.packed or str(self.run.kept_dtype()).removeprefix("torch."),
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.estimate.peak_phase,
            "breakdown_bytes": dict(self.estimate.breakdown),
            "left_bytes": self.left_bytes,
            "tight": self.is_tight,
            "step_seconds": self.time.total,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "relative_speed": self.relative_speed,
            "bound_by": self.time.bound,
            "reasons": list(self.reasons),
            "notes": list(self.estimate.notes),
        }


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


def _code(run: Run, model: str, *, has_varlen: bool) -> Iterator[str]:
    """Lines of code that run a plan; ``has_varlen``: whether the model can attend within rows of a pack."""
    imports = {"import peft": run.lora, "import torchao.optim": run.optimizer == "adamw8bit"}
    yield from (line for line, is_used in imports.items() if is_used)
    yield "fs.init_distributed()"
    mesh = _arguments(dp_replicate=(str(run.dp_replicate), "1"), cp=(str(run.cp), "1"))
    yield f"mesh = fs.build_mesh({mesh})"
    yield from _model(run, model)
    changes = {
        "fs.use_varlen_attention(model)": has_varlen and not run.attention_mask,
        "fs.use_context_parallel(model, mesh=mesh)": run.shares_rows,
        "fs.prepare_loss(model, impl='logits')": run.loss_impl == "logits",
    }
    yield from (line for line, is_used in changes.items() if is_used)
    yield f"optimizer = {_OPTIMIZERS[run.optimizer]}"
    if run.attention_mask or not (has_varlen or run.shares_rows):
        yield (
            f"loader = DataLoader(rows, {run.micro_batch_size}, sampler=fs.ResumableSampler(rows), "
            "collate_fn=...)"
        )
    else:  # a pack has the tokens of a micro-batch
        tokens = run.micro_batch_size * run.seq_length
        yield (
            "lengths, num_targets = fs.row_sizes(rows)\n"
            f"sampler = fs.PackedSampler(lengths, num_targets=num_targets, max_length={tokens})\n"
            f"collate = fs.PackedCollator(max_length={tokens})\n"
            "loader = DataLoader(rows, batch_sampler=sampler, collate_fn=collate)"
        )
    yield f"for window in fs.windows(loader, grad_accum_steps={run.grad_accum_steps}):"
    yield (
        "    fs.train_step("
        f"{_arguments('model', 'window', 'optimizer', grad_sync=(repr(run.grad_sync), repr('each')))})"
    )


def _model(run: Run, name: str) -> Iterator[str]:
    """Lines of code that make the model: ``load_pretrained``, or its steps where it lacks an argument."""
    policy, usual_policy = (
        f"torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype={param}, reduce_dtype={reduce})"
        for param, reduce in ((run.param_dtype, run.reduce_dtype), (torch.bfloat16, torch.float32))
    )
    shard = {
        "reshard_after_forward": (str(run.reshard_after_forward), "True"),
        "master_dtype": (str(run.master_dtype), "torch.float32"),
        "mp_policy": (policy, usual_policy),
    }
    frozen = repr(run.packed or run.kept_dtype())
    usual_frozen = frozen if run.frozen_dtype is None else ""  # what load_pretrained takes by itself
    is_placed = run.sac_ratio and run.sac_placement != "even"
    ratio, placement = repr(str(run.sac_ratio)), (repr(run.sac_placement), "'even'")
    apply_sac = f"fs.apply_sac({_arguments('model', ratio, placement=placement)})"
    if not run.is_made_in_steps:
        all_at_once = {
            "sac_ratio": ("'0'" if is_placed else ratio, "'0'"),
            "compile": (str(run.compile), "False"),
            **shard,
            "peft_config": (run.lora.code if run.lora else "None", "None"),
            "frozen_dtype": (frozen, usual_frozen),
        }
        yield f"model = fs.load_pretrained({_arguments(repr(name), 'mesh=mesh', **all_at_once)})"
        if is_placed:
            yield apply_sac
        return
    yield f"model = fs.build_meta_model({_arguments(repr(name), dtype=shard['master_dtype'])})"
    yield "fs.freeze_towers(model)"
    if run.lora:
        yield f"model = fs.add_adapters(model, {run.lora.code})"
    if run.sac_ratio:
        yield apply_sac
    if run.compile:
        yield "fs.compile_blocks(model)"
    shard["frozen_dtype"] = frozen, "" if run.lora else usual_frozen
    yield f"fs.shard_model({_arguments('model', 'mesh=mesh', **shard, ep_size=(str(run.ep_size), '1'))})"
    yield f"fs.load_weights(model, {name!r})"


def usual_rate(run: Run) -> str:
    """A usual learning rate: ten times higher for adapters."""
    return "1e-4" if run.lora else "1e-5"


def _arguments(*positional: str, **named: tuple[str, str]) -> str:
    """Arguments as code; ``named`` has values and the usual ones, which are left out."""
    keywords = (f"{name}={value}" for name, (value, usual) in named.items() if value != usual)
    return ", ".join([*positional, *keywords])
