"""A simulated accelerator, device type "sim": what ``torch.cuda`` is to CUDA, as ``torch.sim``.

Importing it makes the device known to torch. The rest is C++: begin with ``core.h``.
"""

import contextlib
import sys
import threading
import traceback
import types
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from simdev import _C
from torch.accelerator import (  # noqa: F401  as torch.sim has them
    current_stream,
    empty_cache,
    get_memory_info as mem_get_info,
    max_memory_allocated,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
    synchronize,
)

torch.utils.rename_privateuse1_backend("sim")

# ---------------------------------------------------------------- devices, streams, events


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0):
        return super().__new__(cls, device=torch.device("sim", _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, device="sim", enable_timing=enable_timing)


class device(torch.accelerator.device_index):
    """A context in which a device is the current one."""

    def __init__(self, device):
        super().__init__(None if device == -1 else _index(device))


def stream(stream):
    """A context in which a stream is the current one, and its device the current device."""
    if stream is None:
        return contextlib.nullcontext()
    # A stream of torch is a context, but only once at a time, so another object for it is given out.
    return torch.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def is_available():
    return _C.device_count() > 0


def is_initialized():
    return True


_initialized = True  # or torch's checkpoint takes the device for unused, and keeps no random state of it


def _lazy_init():
    pass


def _is_in_bad_fork():
    return False


device_count, current_device = _C.device_count, _C.current_device


def set_device(device):
    _C.set_device(_index(device))


def _index(device):
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return current_device() if index is None else index


def touched():
    """Indices of the devices on which this process has launched anything: on CUDA each has a context."""
    return [i for i in range(device_count()) if _C.touched(i)]


# ---------------------------------------------------------------- what a device is, as torch.cuda says it


def get_device_name(device=None):
    return f"Simulated device of {torch.get_num_threads()} CPU threads"


def get_device_capability(device=None):
    return (8, 0)  # has bfloat16 and varlen attention


def get_device_properties(device=None):
    major, minor = get_device_capability(device)
    return types.SimpleNamespace(
        name=get_device_name(device),
        uuid=f"simulated-{_index(device)}",
        total_memory=mem_get_info(device)[1],
        major=major,
        minor=minor,
        multi_processor_count=1,
    )


# ---------------------------------------------------------------- random numbers


def get_rng_state(device="sim"):
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(state, device="sim"):
    _C.default_generator(_index(device)).set_state(state)


def manual_seed(seed):
    _C.default_generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed):
    for i in range(device_count()):
        _C.default_generator(i).manual_seed(int(seed))


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float16]


# ---------------------------------------------------------------- when the host waits


@dataclass(frozen=True)
class Sync:
    """A place where the host waited for the device.

    Attributes:
        kind: ``"item"``, ``"copy to host"``, ``"copy to pageable memory"``, ``"copy to device"``,
            ``"event"``, ``"stream"``, ``"device"``, ``"barrier"``, ``"empty_cache"``, or an operator that has
            to know values, such as ``"aten::nonzero"``.
        thread: Name of the thread that waited.
        stack: Its Python frames, the innermost last.
    """

    kind: str
    thread: str
    stack: traceback.StackSummary

    def __str__(self):
        return f"{self.kind} in {self.thread}\n{''.join(self.stack.format())}"


_recorders = []


def _on_wait(kind):
    stack = traceback.StackSummary.from_list(traceback.extract_stack()[:-1])  # without this frame
    sync = Sync(kind, threading.current_thread().name, stack)
    for recorder in _recorders:
        recorder.append(sync)


@contextlib.contextmanager
def record_syncs():
    """A context with a list of each ``Sync`` in it, of all threads of this process."""
    found = []
    _recorders.append(found)
    _C.report_waits(_on_wait)
    try:
        yield found
    finally:
        _recorders[:] = [recorder for recorder in _recorders if recorder is not found]
        if not _recorders:
            _C.report_waits(None)


# ---------------------------------------------------------------- registration


def _create_backend(store, rank, size, timeout):
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._timeout = timeout + timedelta(seconds=1)  # simccl notices first
    options._threads = 1  # of two, each would write to one string: see careful_gloo in _compat/groups.py
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, size, options)
    return _C.make_backend(gloo, rank, size, int(timeout.total_seconds() * 1000))


_C.register_cpu_kernels()
torch._register_device_module("sim", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend("simccl", _create_backend, devices=["sim"])
