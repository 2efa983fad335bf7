"""What a caller does between two steps that train, and what one rank does in the place of a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fsdp_sft as fs
from tests.compositions import architectures, options
from tests.compositions.axes import Draw
from tests.harness.device import device_here


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
    try:
        fs.train_step(
            model, [batch], given, **step_options | ({"loss_fn": failing} if "loss" in what else {})
        )
    except PlantedError:
        return
    finally:
        handle.remove()
    raise AssertionError(f"a step went on after what was to {what}")


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


def answer(draw: Draw, model: Any) -> None:
    """Generate in the middle of the training: each token is the likeliest after a forward without a cache.

    What comes after it is compared with training that has generated nothing.
    """
    prompt = torch.arange(3, 13, device=device_here()).view(2, 5)
    model.eval()
    found = model.generate(
        input_ids=prompt, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    with torch.no_grad():
        logits = model(input_ids=found, use_cache=False).logits[:, 4:-1].float()
    model.train()
    assert found.shape == (2, 9)
    chosen = logits.gather(-1, found[:, 5:, None])[..., 0]
    behind = float((logits.amax(-1) - chosen).max() / logits.abs().max())
    assert behind <= (1e-4 if draw["precision"] == "float32" else 0.1), f"a token is {behind:.2g} behind"
