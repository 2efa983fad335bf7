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
Size = Callable[[torch.Tensor], float]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16 with scaler": torch.float16}
LOW_FLOOR = {torch.bfloat16: 4e-3, torch.float16: 1e-3}  # one rounding of a number that is nowhere averaged

# A norm is one number, and one run's error of it may be small by luck: of 48 norms of plain Gemma 3 with LoRA
# in bfloat16 one was 1.2e-2 off, half of them less than 2e-3.
_LOW_NORM = 2e-2
_NUMBERS = ("losses", "norms", "router_losses", "evaluations")


@dataclass(frozen=True)
class Outcome:
    """How a draw ended.

    Attributes:
        kind: ``"equal"``, ``"refused"`` or ``"fault"``.
        reason: The id of the refusal, or what is wrong.
    """

    kind: str
    reason: str = ""


def judge(draw: Draw, seed: int = 0) -> Outcome:
    """Try one draw; never raises."""
    with tempfile.TemporaryDirectory(prefix="composition-") as name:
        try:
            return _judge(draw, seed, Path(name))
        except AssertionError as different:
            return Outcome("fault", str(different))
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            return Outcome("fault", f"{type(error).__name__}: {text[:800]} ... {text[-1500:]}")


def _judge(draw: Draw, seed: int, folder: Path) -> Outcome:
    rows, held_out = _rows(draw, seed), _rows(draw, seed + 1)[:5]
    architectures.write(
        architectures.build(draw["architecture"], seed=seed), folder / "base", draw["stored"], draw["frozen"]
    )
    told: list[list[Told]] = []
    for first, last in options.parts(draw):
        mesh = draw["mesh"] if first == 1 else options.resumed_mesh(draw)
        most = _SECONDS if draw["compile"] == "no" else _COMPILING_SECONDS
        with poisoned():
            results = run_distributed(
                run, options.ranks_of(mesh), dict(draw), folder, rows, held_out, first, last, timeout=most
            )
        refusals = [result for result in results if isinstance(result, tuple)]
        if refusals:
            return _refused(draw, refusals, len(results))
        told.append(results)
    expected = [reason.name for reason in reasons.applying(draw) if not reason.sometimes]
    expected += ["a rank that differs"] * (draw["odd rank"] != "none")
    assert not expected, f"expected a refusal ({expected}), but it ran"
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
    said = ": ".join(refusals[0])
    assert len(refusals) == ranks, f"{len(refusals)} of {ranks} ranks raised {said}"
    if draw["odd rank"] != "none":  # of the library, as what a rank returns is: see caller.run
        return Outcome("refused", "a rank that differs")
    given = reasons.of(*refusals[0])
    assert given, f"refused for no reason that is listed: {said}"
    holding = [reason.name for reason in given if reason in reasons.applying(draw)]
    assert holding, f"refused although {[reason.name for reason in given]} does not apply: {said}"
    return Outcome("refused", holding[0])


def _compare(draw: Draw, told: list[list[Told]], held_out: list[Row], folder: Path) -> None:
    for results in told:
        numbers = [(result.trained.losses, result.trained.norms) for result in results]
        assert all(other == numbers[0] for other in numbers), "ranks were told different losses or norms"
    first, last = told[0][0], told[-1][0]
    windows = [
        [batch for result in results for batch in result.windows[step]]
        for results in told
        for step in range(len(results[0].windows))
    ]
    assert len(windows) == options.STEPS, f"{len(windows)} steps of {options.STEPS}"
    _check_rows(draw, windows, [epoch for results in told for epoch in results[0].epochs])
    if draw["twist"] == "keys differ":
        windows = [
            [{k: v for k, v in b.items() if k != "position_ids"} for b in window] for window in windows
        ]
    batches = [options.collated(draw, [row]) for row in held_out]
    dtype = _DTYPES[draw["precision"]]
    start = first.trained.start
    plainly = partial(_plainly, draw, folder, start, windows, batches)
    owns = [plainly(dtype)[1]]
    exact_model, exact = plainly(torch.float64)
    _check_start(draw, start, folder)
    ours = Trained(gradients=first.trained.gradients, start=start, parameters=last.trained.parameters)
    for what in _NUMBERS:
        setattr(ours, what, [value for results in told for value in getattr(results[0].trained, what)])
    try:
        _compare_trained(draw, ours, owns, exact, dtype)
    except AssertionError:
        if dtype == torch.float32:
            raise
        owns.append(plainly(dtype, disturbed=True)[1])  # one run's error may be small by luck
        _compare_trained(draw, ours, owns, exact, dtype)
    if _is_exact(draw):
        assert ours.losses == owns[0].losses, f"losses are {ours.losses}, bit for bit {owns[0].losses}"
        for name, tensor in owns[0].parameters.items():
            assert torch.equal(ours.parameters[name], tensor), (
                f"{name} is not bit for bit that of plain training"
            )
    assert draw["resume"] == "no" or last.steps == list(range(1, options.STEPS + 1)), (
        f"of the steps saved there are {last.steps}"
    )
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
    runs = (ours, *owns, exact)
    for what in _NUMBERS:
        least = max(floor, _LOW_NORM) if what == "norms" and dtype != torch.float32 else floor
        by_step = [
            {
                f"{what}[{step}]": torch.tensor(value, dtype=torch.float64)
                for step, value in enumerate(getattr(run, what))
            }
            for run in runs
        ]
        _close("", by_step, least, _largest)
    # In 16 bits the largest error is that of one number that hardly has a gradient.
    size = _largest if dtype == torch.float32 else _root_mean_square
    _close("the gradient of ", [run.gradients for run in runs], floor, size)
    # What Muon makes of a gradient that is nearly singular hangs on its last bits.
    _close(
        "the change of ", [_change(run.parameters, run.start) for run in runs], 0.3 if muon else floor, size
    )


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
    assert expected.keys() == start.keys(), f"only one has {sorted(expected.keys() ^ start.keys())[:4]}"
    for name, tensor in expected.items():
        value, right = start[name], tensor.detach().to(start[name].dtype)
        if plain.is_random(name):
            drawn = value.isfinite().all() and 0 < float(value.double().std()) < 10
            assert drawn, f"{name} does not look like an initialisation"
        else:
            if right.shape[:1] == (architectures.GROWN,) and value.dtype != torch.float32:
                # The mean of what is stored in 16 bits is not that of what was read, rounded.
                right[VOCABULARY:] = value[VOCABULARY:]
            assert torch.equal(right, value), f"{name} starts at other values"


def _check_rows(draw: Draw, windows: Any, epochs: list[int]) -> None:
    """Within an epoch no row is trained twice, but for what fills up its last round; none is left out."""
    total = len(drawn_rows(0))
    for epoch in sorted(set(epochs)):
        own = [window for window, number in zip(windows, epochs, strict=True) if number == epoch]
        again = Counter(tuple(row[:2]) for window in own for batch in window for row in rows_of(batch))
        twice = sum(times > 1 for times in again.values())
        is_whole = epoch != max(epochs)
        most = 3 if is_whole or len(again) == total else 0  # ranks minus one fill up the last round
        assert twice <= most, f"epoch {epoch} trained {twice} rows twice"
        if is_whole and draw["loader"] != "list" and draw["batches"] == "padded":
            assert len(again) >= total - 3, f"epoch {epoch} trained {len(again)} of {total} rows"


def _close(what: str, runs: list[Tensors], floor: float, size: Size) -> None:
    """The first of the runs is as close to the last as those between, or as ``floor``."""
    ours, *owns, exact = runs
    assert ours.keys() == exact.keys(), f"only one has {what}{sorted(ours.keys() ^ exact.keys())[:4]}"
    scale = max(map(size, exact.values()), default=1.0) or 1.0
    errors = [size(own[name].double() - tensor.double()) for own in owns for name, tensor in exact.items()]
    allowed = max(floor, 3 * max(errors, default=0.0) / scale)
    for name, tensor in exact.items():
        error = size(ours[name].double() - tensor.double()) / scale
        assert error <= allowed, f"{what}{name} is off by {error:.2e} (allowed {allowed:.1e})"


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
    for name, parameter in model.named_parameters():
        parameter.data.copy_(ours[name].double())
    if draw["adapters"] != "none":
        model = model.merge_and_unload()
    expected, found = dict(model.named_parameters()), dict(again.named_parameters())
    assert expected.keys() == found.keys(), (
        f"the export differs by {sorted(expected.keys() ^ found.keys())[:4]}"
    )
    for name, tensor in expected.items():
        error = _largest(found[name].double() - tensor.double()) / (float(tensor.abs().max()) or 1.0)
        assert error <= (1e-6 if dtype == torch.float32 else 2**-8), (
            f"the export's {name} is off by {error:.2e}"
        )
    assert draw["export"] != "into a full folder" or (folder / "exported" / "notes.txt").exists(), (
        "the export deleted what was in the folder"
    )
