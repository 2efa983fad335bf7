"""A simulated accelerator, device type "sim": see core.h."""

import sys

import torch
import torch.distributed as dist
from simdev import _C

torch.utils.rename_privateuse1_backend("sim")


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **kwargs):
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        index = current_device() if device is None else torch.device(device).index
        return super().__new__(cls, device=torch.device("sim", index), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, device="sim", enable_timing=enable_timing)


class device:
    def __init__(self, device):
        self.index = torch.device(device).index if not isinstance(device, int) else device
        self.before = None

    def __enter__(self):
        self.before = current_device()
        if self.index is not None and self.index >= 0:
            set_device(self.index)

    def __exit__(self, *_):
        set_device(self.before)


class StreamContext:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.device = current_device()
            self.before = current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_):
        if self.stream is not None:
            torch.accelerator.set_stream(self.before)
            set_device(self.device)


stream = StreamContext


def is_available():
    return _C.device_count() > 0


def is_initialized():
    return True


def init():
    pass


_lazy_init = init


def _is_in_bad_fork():
    return False


def device_count():
    return _C.device_count()


def current_device():
    return _C.current_device()


def set_device(device):
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None:
        _C.set_device(index)


def current_stream(device=None):
    return torch.accelerator.current_stream(device)


def set_stream(stream):
    torch.accelerator.set_stream(stream)


def synchronize(device=None):
    torch.accelerator.synchronize(device)


def empty_cache():
    pass


def _index(device):
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return current_device() if index is None else index


def memory_allocated(device=None):
    return _C.allocated(_index(device))


def max_memory_allocated(device=None):
    return _C.peak(_index(device))


def reset_peak_memory_stats(device=None):
    _C.reset_peak(_index(device))


def touched():
    """Indices of the devices on which this process has launched anything: on CUDA each has a context."""
    return [i for i in range(device_count()) if _C.touched(i)]


def get_rng_state(device="sim"):
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(state, device="sim"):
    _C.default_generator(_index(device)).set_state(state)


def manual_seed(seed):
    _C.default_generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed):
    for i in range(device_count()):
        _C.default_generator(i).manual_seed(int(seed))


def initial_seed():
    return _C.default_generator(current_device()).initial_seed()


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float16]


def _create_backend(store, rank, size, timeout):
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, size, timeout)
    return _C.Backend(gloo, rank, size)


_C.register_cpu_kernels()
torch._register_device_module("sim", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend("simccl", _create_backend, devices=["sim"])
