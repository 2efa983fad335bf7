"""Whether a few layers train here as in one process: losses, norms, weights, also after a save and a load."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fsdp_sft._process.host_memory import available_host_bytes
from fsdp_sft._ranks.agree import through_rank_0
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.device_memory import memory_of_device
from fsdp_sft.check.layers import fitting_layers, is_in_time, layers_in, time_for, written
from fsdp_sft.check.mechanism import Check, Outcome, Trouble
from fsdp_sft.check.training import (
    Batches,
    PlainTraining,
    full_parameters,
    make_batches,
    plain_model,
    sharded_model,
)
from fsdp_sft.dcp_io import load_checkpoint, save_checkpoint
from fsdp_sft.loss import prepare_loss
from fsdp_sft.step import train_step

_ROWS, _LENGTH = 2, 32
_RATE, _MAX_NORM = 0.5, 1.0
# In float32 only the order of sums differs. Norms add up more than losses; a weight is compared with how far
# it has moved, of which its own rounding can be a part.
_LOSS, _NORM, _WEIGHTS, _CANCELLED = 2e-5, 2e-4, 2e-3, 1e-5
# In bfloat16 this library may be so many times as far from float32 as one process in bfloat16 is.
_TIMES, _LEAST_LOSS, _LEAST_NORM = 3.0, 5e-3, 3e-2
_Steps = list[tuple[float, float]]  # loss and gradient norm of each step
_Weights = dict[str, torch.Tensor]
# Bytes of a parameter on rank 0: two models, gradients, a twin. On a CPU also what all ranks have, and
# what is gathered before and after.
_ON_DEVICE, _ON_HOST = 16, 28


@dataclass(frozen=True)
class _Trained:
    """What two steps gave; the weights are whole on rank 0 if it was in float32, and elsewhere none."""

    steps: _Steps
    before: _Weights
    after: _Weights


def _run(cluster: Cluster) -> Outcome:
    if cluster.folder is None:
        return Outcome(unseen=cluster.no_folder)
    need, room = _room(cluster)
    config, why_not = fitting_layers(cluster, torch.float32, parameter_bytes=need, room=room)
    if why_not:
        return Outcome(unseen=why_not)
    dtypes = [torch.float32]
    if is_in_time(cluster, config, torch.bfloat16):
        dtypes.append(torch.bfloat16)
    with time_for(cluster, config):
        source = written(cluster, config)
        batches, own = make_batches(cluster, config, rows=_ROWS, length=_LENGTH)
        ours = {dtype: _trained(cluster, source, batches.of(own), dtype) for dtype in dtypes}

        def judge(_: list[None]) -> tuple[list[Trouble], list[str]]:
            return _compared(cluster, source, ours, batches)

        troubles, said = through_rank_0("comparing with one process", lambda: None, judge)
    features = _features(cluster)
    text = f"{layers_in(config)} layers, {', '.join(said)} of one process{features}; saved and loaded"
    slow = "bfloat16, which takes too long here; try --seconds" if len(dtypes) == 1 else ""
    return Outcome(text, tuple(troubles), unseen=slow)


def _room(cluster: Cluster) -> tuple[int, int | None]:
    """(bytes that a parameter takes, bytes that there are for them if that is known)."""
    known = memory_of_device(cluster.device)
    if known is not None:
        return _ON_DEVICE, known[0]
    free = available_host_bytes()
    return _ON_HOST, None if free is None else free * 3 // 4


def _features(cluster: Cluster) -> str:
    asked = cluster.asked
    parts = {
        f"{asked.replicas} replicas": asked.replicas > 1,
        f"cp {asked.cp}": asked.cp > 1,
        f"ep {asked.ep_size}": asked.ep_size > 1,
        f"base in {asked.frozen_dtype}": asked.frozen_dtype is not None,
        "compiled": asked.compile,
    }
    named = ", ".join(part for part, is_so in parts.items() if is_so)
    return f" ({named})" if named else ""


def _compared(
    cluster: Cluster, source: Path, ours: dict[torch.dtype, _Trained], batches: Batches
) -> tuple[list[Trouble], list[str]]:
    """(what differs from the plain training in two steps, by how much the first loss does in each dtype)."""
    troubles: list[Trouble] = []
    said = []
    wide = ours[torch.float32]
    values = wide.before if cluster.asked.frozen_dtype is not None else None
    exact, weights = _plain(source, cluster.device, values, torch.float32, batches)
    for dtype, mine in ours.items():
        if dtype == torch.float32:
            troubles += [*_judge_steps(mine.steps, exact), *_judge_weights(mine.before, mine.after, weights)]
        else:
            rounded = _plain(source, cluster.device, values, dtype, batches)[0]
            troubles += _judge_rounded(mine.steps, exact, rounded)
        off = abs(mine.steps[0][0] / exact[0][0] - 1)
        said.append(f"{str(dtype).removeprefix('torch.')} within {off:.1e}")
    return troubles, said


def _trained(cluster: Cluster, source: Path, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> _Trained:
    """Two steps, with a save and a load between them."""
    assert cluster.folder is not None
    root = cluster.folder / f"steps-{str(dtype).removeprefix('torch.')}"
    model = sharded_model(cluster, source, dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=_RATE)
    prepare_loss(model, router_loss=_router(model))
    is_wide = dtype == torch.float32
    before = full_parameters(model) if is_wide else {}
    first = train_step(model, [batch], optimizer, max_grad_norm=_MAX_NORM, check=False)
    save_checkpoint(root, 1, model=model, optimizer=optimizer)
    with torch.no_grad():
        for parameter in trained:
            parameter.zero_()
    load_checkpoint(root, model=model, optimizer=optimizer)
    second = train_step(model, [batch], optimizer, max_grad_norm=_MAX_NORM, check=False)
    return _Trained(
        [(result.loss, result.grad_norm) for result in (first, second)],
        before,
        full_parameters(model) if is_wide else {},
    )


def _router(model: Any) -> Literal["off"] | None:
    """``"off"`` for a mixture, so that both sides have the cross entropy alone; None for other models."""
    text = model.config.get_text_config(decoder=True)
    has_loss = any(getattr(text, name, None) for name in ("router_aux_loss_coef", "output_router_logits"))
    return "off" if has_loss else None


def _plain(
    source: Path,
    device: torch.device,
    values: dict[str, torch.Tensor] | None,
    dtype: torch.dtype,
    batches: Batches,
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss and norm of each step in one process, the weights after them)."""
    wide = torch.float32
    model = plain_model(source, device, values, wide)
    twin = plain_model(source, device, values, dtype) if dtype != wide else None
    training = PlainTraining(model, twin)
    steps = [training.step(batches, rate=_RATE, max_norm=_MAX_NORM) for _ in range(2)]
    return steps, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def _judge_steps(ours: _Steps, plain: _Steps) -> list[Trouble]:
    found = []
    for number, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        when = "in the first step" if number == 0 else "after a save and a load"
        for name, at_most, place in (("loss", _LOSS, 0), ("gradient norm", _NORM, 1)):
            one, other = mine[place], theirs[place]
            if not abs(one - other) <= at_most * abs(other):
                found.append(_trouble(f"{name} {one:.7g} {when}, and {other:.7g} in one process (float32)"))
    return found


def _judge_weights(before: _Weights, after: _Weights, plain: _Weights) -> list[Trouble]:
    """The weight that is furthest off, if one is off by more than rounding explains."""
    worst, by = "", _WEIGHTS
    moves = {name: float((theirs - before[name]).abs().max()) for name, theirs in plain.items()}
    # Some gradients are sums that cancel, such as that of the bias of keys: what is left is rounding.
    nothing = _CANCELLED * max(moves.values())
    for name, theirs in plain.items():
        moved = moves[name]
        rounding = float(theirs.abs().max()) * 2.0**-22 + nothing
        apart = float((after[name] - theirs).abs().max())
        if not apart <= by * moved + rounding:
            worst, by = name, apart / max(moved, 1e-12)
    if not worst:
        return []
    return [_trouble(f"{worst} is off by {by:.1%} of what two steps have moved it (float32)")]


def _judge_rounded(ours: _Steps, exact: _Steps, rounded: _Steps) -> list[Trouble]:
    found = []
    for name, least, place in (("loss", _LEAST_LOSS, 0), ("gradient norm", _LEAST_NORM, 1)):
        # The larger of both steps: in one of them rounding may have made little of a difference.
        off = max(abs(theirs[place] / wide[place] - 1) for wide, theirs in zip(exact, rounded, strict=True))
        for mine, wide, theirs in zip(ours, exact, rounded, strict=True):
            if not abs(mine[place] / wide[place] - 1) <= max(_TIMES * off, least):
                text = f"{name} {mine[place]:.5g}, {theirs[place]:.5g} in one process (bfloat16)"
                found.append(_trouble(f"{text} and {wide[place]:.5g} in float32"))
    return found


def _trouble(text: str) -> Trouble:
    advice = "do not train like this: see what the check of reductions says, and report it with fsdp-sft env"
    return Trouble("fail", (), f"{text}: {advice}")


CHECK = Check("parity", "do a few layers of the model train here as in one process?", 130, 20, _run)
