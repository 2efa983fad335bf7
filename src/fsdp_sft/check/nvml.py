"""What NVIDIA's management library says of a GPU: faults, throttling, links. Read by ctypes, no package."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

# Names and numbers of nvml.h: https://docs.nvidia.com/deploy/nvml-api/
_LIBRARY = "libnvidia-ml.so.1"
_UNCORRECTED, _VOLATILE = 1, 0  # nvmlMemoryErrorType_t; nvmlEccCounterType_t: since the driver was loaded
# Reasons for lower clocks that a healthy GPU does not have: hardware slowdown, of heat in hardware and in
# software, power brake. A cap on power (0x4) is normal under load.
_SLOWED = {0x8: "hardware slowdown", 0x40: "heat (hardware)", 0x20: "heat (software)", 0x80: "power brake"}


@dataclass(frozen=True)
class GpuHealth:
    """What the library says of one GPU; None for what it cannot say of it.

    Attributes:
        uncorrected: Memory errors since the driver was loaded that could not be corrected.
        remap_pending: Whether rows of memory wait for a reset of the GPU to be replaced.
        remap_failed: Whether replacing a row of memory has failed.
        slowed_by: Why its clocks are lowered now; "" for no reason that counts.
        pcie_width: Lanes of its link in use.
        pcie_most: Lanes that GPU and slot have.
    """

    uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    slowed_by: str | None = None
    pcie_width: int | None = None
    pcie_most: int | None = None


def driver_version() -> str | None:
    """Version of the driver; None where it cannot be read."""
    library = _library()
    if library is None:
        return None
    text = ctypes.create_string_buffer(96)
    return text.value.decode() if library.nvmlSystemGetDriverVersion(text, 96) == 0 else None


def health_of(uuid: str) -> GpuHealth | None:
    """What the library says of the GPU with this UUID; None where there is no library or no such GPU."""
    library = _library()
    handle = ctypes.c_void_p()
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    if library is None or library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
        return None
    errors = _number(
        library, "nvmlDeviceGetTotalEccErrors", ctypes.c_ulonglong, handle, _UNCORRECTED, _VOLATILE
    )
    reasons = _number(library, "nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong, handle)
    slowed = None if reasons is None else ", ".join(why for bit, why in _SLOWED.items() if reasons & bit)
    rows = _remapped_rows(library, handle)
    return GpuHealth(
        uncorrected=errors,
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        slowed_by=slowed,
        pcie_width=_number(library, "nvmlDeviceGetCurrPcieLinkWidth", ctypes.c_uint, handle),
        pcie_most=_number(library, "nvmlDeviceGetMaxPcieLinkWidth", ctypes.c_uint, handle),
    )


def _number(library: Any, function: str, kind: Callable[[], Any], *arguments: Any) -> int | None:
    """The number that a function writes behind its arguments; None if it cannot."""
    found = kind()
    call = getattr(library, function, None)
    return None if call is None or call(*arguments, ctypes.byref(found)) != 0 else int(found.value)


def _remapped_rows(library: Any, handle: Any) -> tuple[int, ...] | None:
    """(correctable, uncorrectable, pending, failed); None on GPUs that do not replace rows."""
    found = [ctypes.c_uint() for _ in range(4)]
    call = getattr(library, "nvmlDeviceGetRemappedRows", None)
    if call is None or call(handle, *map(ctypes.byref, found)) != 0:
        return None
    return tuple(int(one.value) for one in found)


@cache
def _library() -> Any:
    """The library, initialised; None without NVIDIA's driver."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None
