"""What a caller does between two steps that train, and what one rank does in the place of a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.compositions import architectures, options
from tests.compositions.axes import Draw


def change(draw: Draw, step: int, made: list[Any], model: Any, inner: Any) -> None:
    options.change(draw, step, made, inner)
    if draw[f"before step {step}"] == "a hook on a block" and draw["loss"] != "loss_fn":
        impl = draw["loss"] if draw["loss"] in ("chunked", "logits") else "auto"
        fs.prepare_loss(model, impl=impl)  # type: ignore[arg-type]


class PlantedError(Exception):
    """Raised by the caller's own code."""


def fail(what: str, model: Any, inner: Any, given: Any, batch: Any, step_options: dict[str, Any]) -> None:
    """A step in which the caller's own code raises, on every rank; what comes after it is compared."""

    def bomb(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if what == "fail in a forward":
            raise PlantedError(what)
        if what == "fail in a backward" and hidden.requires_grad:
            hidden.register_hook(explode)

    def explode(gradient: torch.Tensor) -> None:
        raise PlantedError(what)

    def failing(model: Any, batch: Any) -> torch.Tensor:
        own_loss(model, batch)
        raise PlantedError(what)

    own_loss = step_options.get("loss_fn", fs.loss_sum)
    handle = options.block_of(inner, -1).register_forward_hook(bomb)
    if "loss" in what:
        step_options = {**step_options, "loss_fn": failing}
    with pytest.raises(PlantedError):
        fs.train_step(model, [batch], given, **step_options)
    handle.remove()


def be_odd(
    draw: Draw,
    folder: Path,
    parts: tuple[Any, Any, Any, list[Any]],
    window: list[Any],
    evaluate: Callable[[], float],
    step_options: dict[str, Any],
) -> None:
    """What one rank does where the others train."""
    (model, inner, given, made), what = parts, draw["odd rank"]
    if what == "leaves a step out":
        return
    if what == "evaluates":
        evaluate()
        return
    if what == "saves":
        fs.save_checkpoint(folder / "odd", 2, model=model, optimizer=given)
        return
    if what == "another rate":
        made[0].param_groups[0]["lr"] = 0.5
    if what == "another block frozen":
        options.switch(options.block_of(inner, 1))
    changed = {"another clip": {"max_grad_norm": 0.5}, "another loss": {"loss_fn": architectures.summed_loss}}
    window = window[:-1] if what == "one batch less" else window
    fs.train_step(model, window, given, **step_options | changed.get(what, {}))
