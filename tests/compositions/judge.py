"""One draw: trained with the library and plainly, and how it ended."""

import copy
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.compositions import architectures, options, plain, reasons
from tests.compositions.axes import ROUTING, Draw
from tests.compositions.caller import Told, run
from tests.compositions.plain import Tensors, Trained
from tests.compositions.rows import VOCABULARY, Row, drawn_rows, rows_of
from tests.harness import device
from tests.harness.poison import poisoned
from tests.harness.ranks import run_distributed

_SECONDS = 200  # a part of a draw may take
_COMPILING_SECONDS = 1000  # every rank compiles for itself: of T5's blocks 18 variants
FLOOR = 2e-6  # relative, of float32
_GROWN = VOCABULARY + architectures.EXTRA_TOKENS
Size = Callable[[torch.Tensor], float]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16 with scaler": torch.float16}
LOW_FLOOR = {torch.bfloat16: 4e-3, torch.float16: 1e-3}  # one rounding of a number that is nowhere averaged

# A norm is one number, and one run's error of it may be small by luck: of 48 norms of plain Gemma 3 with LoRA
# in bfloat16 one was 1.2e-2 off, half of them less than 2e-3.
_LOW_NORM = 2e-2


@dataclass(frozen=True)
class Outcome:
    """How a draw ended.

    Attributes:
        kind: ``"equal"``, ``"refused"`` or ``"fault"``.
        reason: The id of the refusal, or what is wrong.
    """

    kind: str
    reason: str = ""


class _DifferentError(Exception):
    pass


def judge(draw: Draw, seed: int = 0) -> Outcome:
    """Try one draw; never raises."""
    with tempfile.TemporaryDirectory(prefix="composition-") as name:
        try:
            return _judge(draw, seed, Path(name))
        except _DifferentError as different:
            return Outcome("fault", str(different))
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            return Outcome("fault", f"{type(error).__name__}: {text[:800]} ... {text[-1500:]}")


def _judge(draw: Draw, seed: int, folder: Path) -> Outcome:
    rows, held_out = _rows(draw, seed), _rows(draw, seed + 1)[:5]
    model = architectures.build(draw["architecture"], seed=seed)
    architectures.write(model, folder / "base", draw["stored"], draw["frozen"])
    told: list[list[Told]] = []
    for first, last in options.parts(draw):
        mesh = draw["mesh"] if first == 1 else options.resumed_mesh(draw)
        asked = dict(draw), folder, rows, held_out, first, last
        most = _SECONDS if draw["compile"] == "no" else _COMPILING_SECONDS
        with poisoned():
            results = run_distributed(run, options.ranks_of(mesh), *asked, timeout=most)
        refusals = [result for result in results if isinstance(result, tuple)]
        if refusals:
            return _refused(draw, refusals, len(results))
        told.append(results)
    expected = [reason.name for reason in reasons.applying(draw) if not reason.sometimes]
    if expected or draw["odd rank"] != "none":
        raise _DifferentError(f"expected a refusal ({expected}), but it ran")
    _compare(draw, told, held_out, folder)
    return Outcome("equal")


def _rows(draw: Draw, seed: int) -> list[Row]:
    rows = drawn_rows(seed, weighted=draw["loss terms"] == "weights")
    if draw["vocabulary"] == "grown":
        for index, row in enumerate(rows):
            row["input_ids"][-1] = architectures.VOCABULARY + index % architectures.EXTRA_TOKENS
            if row["labels"][-1] != -100:
                row["labels"][-1] = row["input_ids"][-1]
    return rows


def _refused(draw: Draw, refusals: list[tuple[str, str]], ranks: int) -> Outcome:
    error, message = refusals[0]
    if len(refusals) != ranks:
        raise _DifferentError(f"{len(refusals)} of {ranks} ranks raised {error}: {message}")
    if draw["odd rank"] != "none":  # of the library, as what a rank returns is: see caller.run
        return Outcome("refused", "a rank that differs")
    given = reasons.of(error, message)
    if not given:
        raise _DifferentError(f"refused for no reason that is listed: {error}: {message}")
    holding = [reason for reason in given if reason in reasons.applying(draw)]
    if not holding:
        names = [reason.name for reason in given]
        raise _DifferentError(f"refused although {names} does not apply: {error}: {message}")
    return Outcome("refused", holding[0].name)


def _compare(draw: Draw, told: list[list[Told]], held_out: list[Row], folder: Path) -> None:
    for results in told:
        for other in results[1:]:
            if (other.trained.losses, other.trained.norms) != (
                results[0].trained.losses,
                results[0].trained.norms,
            ):
                raise _DifferentError("ranks were told different losses or norms")
    first, last = told[0][0], told[-1][0]
    windows = [
        [batch for result in results for batch in result.windows[step]]
        for results in told
        for step in range(len(results[0].windows))
    ]
    if len(windows) != options.STEPS:
        raise _DifferentError(f"{len(windows)} steps of {options.STEPS}")
    _check_rows(draw, windows, [epoch for results in told for epoch in results[0].epochs])
    if draw["twist"] == "keys differ":
        windows = [
            [{k: v for k, v in b.items() if k != "position_ids"} for b in window] for window in windows
        ]
    batches = [options.collated(draw, [row]) for row in held_out]
    dtype = _DTYPES[draw["precision"]]
    plainly = partial(_plainly, draw, folder, first.start, windows, batches)
    owns = [plainly(dtype)[1]]
    exact_model, exact = plainly(torch.float64)
    _check_start(draw, first.start, folder)
    ours = Trained(
        [loss for results in told for loss in results[0].trained.losses],
        [norm for results in told for norm in results[0].trained.norms],
        [loss for results in told for loss in results[0].trained.router_losses],
        [loss for results in told for loss in results[0].trained.evaluations],
        first.trained.gradients,
        first.start,
        last.trained.parameters,
    )
    try:
        _compare_trained(draw, ours, owns, exact, dtype)
    except _DifferentError:
        if dtype == torch.float32:
            raise
        owns.append(plainly(dtype, disturbed=True)[1])  # one run's error may be small by luck
        _compare_trained(draw, ours, owns, exact, dtype)
    if _is_exact(draw):
        for step, (loss, right) in enumerate(zip(ours.losses, owns[0].losses, strict=True)):
            if loss != right:
                raise _DifferentError(f"losses[{step}] is {loss!r}, bit for bit it is {right!r}")
        for name, tensor in owns[0].parameters.items():
            if not torch.equal(ours.parameters[name], tensor):
                raise _DifferentError(f"{name} is not bit for bit that of plain training")
    if draw["resume"] != "no" and last.steps != list(range(1, options.STEPS + 1)):
        raise _DifferentError(f"of the steps saved there are {last.steps}")
    if last.exported is not None:
        _check_export(draw, Path(last.exported), ours.parameters, exact_model, folder)


def _compare_trained(
    draw: Draw, ours: Trained, owns: list[Trained], exact: Trained, dtype: torch.dtype
) -> None:
    """No further from float64 than three times the largest error of plain runs in the draw's precision."""
    muon = draw["optimizer"].startswith("muon")  # iterates in bfloat16
    floor = 5e-3 if muon else FLOOR
    if dtype != torch.float32:  # a token that goes to another expert is no rounding
        floor = max(floor, 4e-2 if draw["architecture"] in ROUTING else LOW_FLOOR[dtype])
    for what in ("losses", "norms", "router_losses", "evaluations"):
        least = max(floor, _LOW_NORM) if what == "norms" and dtype != torch.float32 else floor
        plain_ones = [getattr(own, what) for own in owns]
        _close_numbers(what, getattr(ours, what), plain_ones, getattr(exact, what), least)
    # In 16 bits the largest error is that of one number that hardly has a gradient.
    size = _largest if dtype == torch.float32 else _root_mean_square
    _close("gradients", ours.gradients, [own.gradients for own in owns], exact.gradients, floor, size)
    change, *changes, right = [_change(run.parameters, run.start) for run in (ours, *owns, exact)]
    # What Muon makes of a gradient that is nearly singular hangs on its last bits.
    _close("changes of parameters", change, changes, right, 0.3 if muon else floor, size)


def _is_exact(draw: Draw) -> bool:
    """Whether the library does the very same operations as the plain loop, on the same device: the CPU."""
    return (
        device.asked() == "cpu"
        and draw["mesh"] in ("single", "1")
        and options.resumed_mesh(draw) == draw["mesh"]
        and draw["precision"] == "float32"
        and draw["loss"] in ("logits", "loss_fn")
        and draw["loss terms"] == "plain"
        and (draw["batches"], draw["compile"]) == ("padded", "no")
        and draw["architecture"] != "moe with router loss"
        # FSDP2 hands each block's inputs through a node of its own. So the gradients of the encoder's states,
        # which all decoder blocks read, are added up in another order: fully_shard alone moves their last
        # bits, in 27 of 68 parameters of this T5.
        and (draw["architecture"], draw["mesh"]) != ("encoder-decoder", "1")
    )


def _plainly(
    draw: Draw,
    folder: Path,
    start: Tensors,
    windows: Any,
    held_out: Any,
    precision: torch.dtype,
    *,
    disturbed: bool = False,
) -> tuple[Any, Trained]:
    """(the trained plain model, how that went), on request from weights that are half a rounding off."""
    model = architectures.read(folder / "base", draw["architecture"])
    if draw["vocabulary"] == "grown":
        model = plain.grown(model)
    model = plain.adapted(draw, model, start)
    if disturbed:
        plain.disturb(model, torch.finfo(precision).eps / 2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have: with more, sums over many rows are added up in another order
    try:
        return model, plain.train(draw, model, windows, held_out, precision=precision)
    finally:
        torch.set_num_threads(before)


def _check_start(draw: Draw, start: Tensors, folder: Path) -> None:
    """Every parameter and buffer, before the first step, is that of the plain model."""
    model = architectures.read(folder / "base", draw["architecture"])
    model = plain.adapted(draw, plain.grown(model) if draw["vocabulary"] == "grown" else model, start)
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    missing = sorted(expected.keys() ^ start.keys())
    if missing:
        raise _DifferentError(f"parameters and buffers differ by {missing[:4]}")
    for name, tensor in expected.items():
        value = start[name]
        if plain.is_random(name):
            if not (value.isfinite().all() and 0 < float(value.double().std()) < 10):
                raise _DifferentError(f"{name} does not look like an initialisation")
            continue
        expected_value = tensor.detach().to(value.dtype)
        if expected_value.shape[:1] == (_GROWN,) and value.dtype != torch.float32:
            # The mean of what is stored in 16 bits is not that of what was read, rounded.
            expected_value[VOCABULARY:] = value[VOCABULARY:]
        if not torch.equal(expected_value, value):
            off = (tensor.detach().double() - value.double()).abs().max()
            raise _DifferentError(f"{name} starts at other values, by up to {float(off):.2g}")


def _check_rows(draw: Draw, windows: Any, epochs: list[int]) -> None:
    """Within an epoch no row is trained twice, but for what fills up its last round; none is left out."""
    total = len(drawn_rows(0))
    for epoch in sorted(set(epochs)):
        own = [window for window, number in zip(windows, epochs, strict=True) if number == epoch]
        trained = [tuple(row[:2]) for window in own for batch in window for row in rows_of(batch)]
        again = Counter(trained)
        twice = [row for row, times in again.items() if times > 1]
        is_whole = epoch != max(epochs)
        most = 3 if is_whole or len(again) == total else 0  # ranks minus one fill up the last round
        if len(twice) > most:
            raise _DifferentError(f"epoch {epoch} trained {len(twice)} rows twice")
        if (
            is_whole
            and draw["loader"] not in ("list",)
            and draw["batches"] == "padded"
            and len(again) < total - 3
        ):
            raise _DifferentError(f"epoch {epoch} trained {len(again)} of {total} rows")


def _close_numbers(
    what: str, ours: list[float], owns: list[list[float]], exact: list[float], floor: float
) -> None:
    if not len(ours) == len(owns[0]) == len(exact):
        raise _DifferentError(f"{what}: {len(ours)} of {len(exact)}")
    scale = max([abs(value) for value in exact] or [1.0]) or 1.0
    errors = [abs(a - b) / scale for own in owns for a, b in zip(own, exact, strict=True)]
    allowed = max(floor, 3 * max(errors, default=0.0))
    for step, (value, right) in enumerate(zip(ours, exact, strict=True)):
        if not abs(value - right) / scale <= allowed:
            raise _DifferentError(
                f"{what}[{step}] is {value:.8g}, right is {right:.8g} (allowed {allowed:.1e})"
            )


def _close(what: str, ours: Tensors, owns: list[Tensors], exact: Tensors, floor: float, size: Size) -> None:
    if ours.keys() != exact.keys():
        raise _DifferentError(f"{what} differ by {sorted(ours.keys() ^ exact.keys())[:4]}")
    scale = max(map(size, exact.values())) or 1.0
    errors = [size(own[name].double() - tensor.double()) for own in owns for name, tensor in exact.items()]
    allowed = max(floor, 3 * max(errors) / scale)
    for name, tensor in exact.items():
        error = size(ours[name].double() - tensor.double()) / scale
        if not error <= allowed:
            raise _DifferentError(f"{what}: {name} is off by {error:.2e} (allowed {allowed:.1e})")


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _root_mean_square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def _change(after: Tensors, before: Tensors) -> Tensors:
    return {name: tensor.double() - before[name].double() for name, tensor in after.items()}


def _check_export(draw: Draw, exported: Path, ours: Mapping[str, Any], exact: Any, folder: Path) -> None:
    """What plain transformers reads back says what the oracle's last model says."""
    dtype = torch.float32 if draw["export"] == "float32" else torch.bfloat16
    again = architectures.auto_class(draw["architecture"]).from_pretrained(exported, dtype=dtype)
    model = copy.deepcopy(exact)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(ours[name].double())
    if draw["adapters"] != "none":
        model = model.merge_and_unload()
    expected = dict(model.named_parameters())
    found = dict(again.named_parameters())
    if expected.keys() != found.keys():
        raise _DifferentError(f"the export differs by {sorted(expected.keys() ^ found.keys())[:4]}")
    for name, tensor in expected.items():
        scale = float(tensor.abs().max()) or 1.0
        error = _largest(found[name].double() - tensor.double()) / scale
        if not error <= (1e-6 if dtype == torch.float32 else 2**-8):
            raise _DifferentError(f"the export's {name} is off by {error:.2e}")
    if draw["export"] == "into a full folder" and not (folder / "exported" / "notes.txt").exists():
        raise _DifferentError("the export deleted what was in the folder")
