"""Random number generators: torch's of every device, Python's and numpy's; saved, restored, left alone."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def unmoved(devices: Iterable[torch.device] = (), *, seed: int | None = None) -> Iterator[None]:
    """Leave every generator as it was.

    Args:
        devices: Accelerators that the block may draw on; the CPU, Python and numpy are always kept.
        seed: Of the CPU's generator within the block; None goes on where it stands. ``torch.manual_seed``
            would seed the generators of all devices, also of those that are not kept here.
    """
    accelerators = {device for device in devices if device.type not in ("cpu", "meta")}
    host = host_states()
    states = {device: _module_of(device).get_rng_state(device) for device in accelerators}
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield
    finally:
        set_host_states(host)
        for device, state in states.items():
            _module_of(device).set_rng_state(state, device)


def generator_states() -> dict[str, Any]:
    """The states of this process's generators, those of the host and of the current accelerator."""
    state = host_states()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        state[accelerator.type] = _module_of(accelerator).get_rng_state()
    return state


def set_generator_states(state: dict[str, Any]) -> None:
    """Set every generator that ``state`` has and this process knows."""
    set_host_states(state)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in state:
        _module_of(accelerator).set_rng_state(state[accelerator.type])


def check_generator_states(state: dict[str, Any]) -> None:
    """Try a state on generators that nobody uses; raises what setting it would raise."""
    torch.Generator().set_state(state["torch"])
    random.Random().setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.RandomState().set_state(_for_numpy(state["numpy"]))


def host_states() -> dict[str, Any]:
    """``"torch"`` (of the CPU), ``"python"`` and, if it has been imported, ``"numpy"``."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        name, key, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        if name == "MT19937":  # the only one that numpy's global functions use unless told otherwise
            numbers = torch.from_numpy(key.copy())
            state["numpy"] = (name, numbers, int(position), int(has_gauss), float(cached))
    return state


def set_host_states(state: dict[str, Any]) -> None:
    """Set what ``host_states`` gave."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(_for_numpy(state["numpy"]))


def _for_numpy(state: Any) -> tuple[Any, ...]:
    name, key, position, has_gauss, cached = state
    return name, key.numpy(), position, has_gauss, cached


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device)
