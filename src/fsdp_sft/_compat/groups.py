"""Process groups, meshes and collectives."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def careful_gloo() -> Iterator[None]:
    """Context in which new gloo groups connect ranks when they first communicate, with one thread each.

    Connections: by default each rank of each group connects to every other rank at once. Only the environment
    variable ``TORCH_GLOO_LAZY_INIT`` changes that; ``lazy_init`` of a device alone has no effect (torch
    2.13).

    One thread: by default two threads assign the name of their finished work to the same string, without a
    lock (``lastCompletedWorkName`` in ``ProcessGroupGloo::runLoop``). A name too long to be stored inside the
    string object, such as that of DTensor's all-gather, is then sometimes freed twice, and the process
    crashes later elsewhere. The number of threads is an option of the private class
    ``ProcessGroupGloo._Options``, and ``new_group`` does not pass options on.
    """
    import torch.distributed.distributed_c10d as c10d

    original = getattr(c10d, "ProcessGroupGloo", None)  # None in a build of torch without gloo
    is_chosen = _LAZY_GLOO in os.environ
    if original is not None and original.__name__ != "OneThread":  # it is OneThread inside another such block
        c10d.ProcessGroupGloo = _one_thread(original)  # type: ignore[misc]
    if not is_chosen:
        os.environ[_LAZY_GLOO] = "1"
    try:
        yield
    finally:
        if original is not None:
            c10d.ProcessGroupGloo = original  # type: ignore[misc]
        if not is_chosen:
            os.environ.pop(_LAZY_GLOO, None)


@functools.cache
def _one_thread(original: Any) -> Any:
    class OneThread(original):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **others: Any) -> None:
            options = original._Options()
            for name, value in others.items():  # torch 2.15 gives enable_reconfigure, which is an option too
                setattr(options, name, value)
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options._devices = [original.create_device(interface=name) for name in interfaces] or [
                original.create_default_device()
            ]
            options._timeout, options._threads = timeout, 1
            super().__init__(store, rank, size, options)

    return OneThread


_LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"


def forget_meshes() -> None:
    """Empty DTensor's cache of sharding propagation, for a process with a new process group.

    Meshes of the same shape compare equal. So an operation on the new mesh would get the old mesh from the
    cache, whose groups are gone: shards come out wrong, or torch "could not resolve the process group". Only
    the private ``_clear_sharding_prop_cache`` empties the cache. The caches of redistributions and of their
    costs, equally private, keep old groups alive, with threads and sockets.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    for clear in (
        getattr(debug, "_clear_sharding_prop_cache", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
        getattr(_collective_utils.MeshTopoInfo.build_from_mesh, "cache_clear", None),
    ):
        if clear is not None:
            clear()


def split_axis(mesh: Any, axis: str, sizes: dict[str, int]) -> Any:
    """``mesh`` with one axis split into several, over the same ranks in the same order.

    Only flattening is public, and torch warns wherever a flattened axis is used beside another one, hence the
    private ``_unflatten``. It gets the axis by its index: torch 2.11 refuses the names of axes that the mesh
    has.
    """
    return mesh._unflatten(mesh.mesh_dim_names.index(axis), tuple(sizes.values()), tuple(sizes))


def exchange_rows(rows: torch.Tensor, group: str) -> torch.Tensor:
    """Send row i of ``rows`` to rank i of a process group, and return what arrives from rank i as row i.

    ``all_to_all_single_autograd`` is differentiable, and an operation that compiled code can hold, which the
    public exchange of ``torch.distributed.nn`` is not.
    """
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    splits = [1] * len(rows)
    return all_to_all_single_autograd(rows, splits, splits, group)  # type: ignore[arg-type]


def default_store() -> Any:
    """The store over which the default process group was made, with the group's prefix.

    Only the private ``_get_default_store`` returns it. Another store would need a port, which only the
    launcher knows.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
