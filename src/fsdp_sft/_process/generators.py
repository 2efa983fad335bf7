"""The random number generators of torch (all devices), Python and numpy: their states saved and restored."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def unmoved(devices: Iterable[torch.device] = (), *, seed: int | None = None) -> Iterator[None]:
    """Context that restores every generator's state at its end.

    Args:
        devices: Accelerators whose generators are restored; those of the CPU, Python and numpy always are.
        seed: Seed of torch's CPU generator within the block; None does not seed it. (``torch.manual_seed`` in
            the block would also seed devices that are not restored.)
    """
    accelerators = {device for device in devices if device.type not in ("cpu", "meta")}
    host = host_states()
    states = {device: torch.get_device_module(device).get_rng_state(device) for device in accelerators}
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield
    finally:
        set_host_states(host)
        for device, state in states.items():
            torch.get_device_module(device).set_rng_state(state, device)


def generator_states() -> dict[str, Any]:
    """States of this process's generators: the host's and the current accelerator's."""
    state = host_states()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    return state


def set_generator_states(state: dict[str, Any]) -> None:
    """Set every generator of this process that has an entry in ``state``."""
    set_host_states(state)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in state:
        torch.get_device_module(accelerator).set_rng_state(state[accelerator.type])


def check_generator_states(state: dict[str, Any]) -> None:
    """Set new generators to ``state``, so that a damaged state raises before those in use are touched."""
    torch.Generator().set_state(state["torch"])
    random.Random().setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.RandomState().set_state(_for_numpy(state["numpy"]))


def host_states() -> dict[str, Any]:
    """States of the host's generators: ``"torch"``, ``"python"`` and, if imported, ``"numpy"``."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        name, key, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        if name == "MT19937":  # what numpy's global functions use by default; others are not kept
            numbers = torch.from_numpy(key.copy())
            state["numpy"] = (name, numbers, int(position), int(has_gauss), float(cached))
    return state


def set_host_states(state: dict[str, Any]) -> None:
    """Set the host's generators to the states that ``host_states`` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(_for_numpy(state["numpy"]))


def _for_numpy(state: Any) -> tuple[Any, ...]:
    """A stored numpy state in the form that ``numpy.random.set_state`` takes."""
    name, key, position, has_gauss, cached = state
    return name, key.numpy(), position, has_gauss, cached
