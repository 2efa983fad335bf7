"""The random number generators of torch (all devices), Python and numpy: their states saved and restored."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdp_sft._process.devices import default_device_type

_ON_THE_HOST = {"torch", "python", "numpy"}


@contextmanager
def unmoved(devices: Iterable[torch.device] = (), *, seed: int | None = None) -> Iterator[None]:
    """Context that restores every generator's state at its end.

    Args:
        devices: Accelerators whose generators are restored; those of the CPU, Python and numpy always are.
        seed: Seed of torch's CPU generator within the block; None does not seed it. (``torch.manual_seed`` in
            the block would also seed devices that are not restored.)
    """
    before = generator_states(devices)
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield
    finally:
        set_generator_states(before)


def generator_states(devices: Iterable[torch.device] | None = None) -> dict[str, Any]:
    """States of this process's generators, by name.

    They are those of the host (``"torch"``, ``"python"`` and, if imported, ``"numpy"``), and of the
    accelerators among ``devices``; None means the current one.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        name, key, *rest = sys.modules["numpy"].random.get_state()
        if name == "MT19937":  # what numpy's global functions use by default; others are not kept
            position, has_gauss, cached = rest
            numbers = (int(position), int(has_gauss), float(cached))
            state["numpy"] = (name, torch.from_numpy(key.copy()), *numbers)
    for device in [torch.device(default_device_type())] if devices is None else devices:
        if device.type not in ("cpu", "meta"):
            state[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_generator_states(state: dict[str, Any]) -> None:
    """Set every generator of this process that has an entry in ``state``."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        name, key, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, key.numpy(), *rest))
    for device in map(torch.device, state.keys() - _ON_THE_HOST):
        if device.type == default_device_type():
            torch.get_device_module(device).set_rng_state(state[str(device)], device)


def check_generator_states(state: dict[str, Any]) -> None:
    """Set the generators to ``state`` and back, so that a damaged state raises before anything is changed."""
    with unmoved([torch.device(default_device_type())]):
        set_generator_states(state)
