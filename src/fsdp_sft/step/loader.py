"""A loader's batches in windows, the same number on all ranks."""

import itertools
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function
from torch.utils.data import DataLoader

from fsdp_sft._ranks.agree import agreed, all_reduce_sum, world_size
from fsdp_sft._ranks.mesh import mesh_of_job, row_group
from fsdp_sft.collate.options import check_count
from fsdp_sft.errors import BatchError
from fsdp_sft.step.window import begun_late, num_rows, to_device

if TYPE_CHECKING:
    from fsdp_sft.metrics.throughput import ThroughputMeter


def windows(
    loader: Iterable[Any] | None,
    grad_accum_steps: int | None = None,
    *,
    global_batch: int | None = None,
    mesh: DeviceMesh | None = None,
    map_fn: Callable[[Any], Any] | None = None,
    meter: "ThroughputMeter | None" = None,
) -> Iterator[list[Any]]:
    """Group a loader's batches into the windows of optimizer steps, the same number on all ranks.

    Before each window the ranks agree on its number of micro-batches, which is the smallest number that any
    rank still has. A rank that runs out early therefore ends the pass for all, and does not hang the others.
    The last window may be short. If reading the data fails on one rank, all ranks raise its error. A sampler
    or data set with ``mark_consumed`` (``ResumableSampler``, ``PackedSampler``, ``PackedStream``) gets the
    number of rows or packs of each window before the window is yielded. After a checkpoint at the end of an
    epoch, the rest of that epoch may have no window.

    Args:
        loader: DataLoader, or any iterable of batches. Of the ranks along ``cp`` the first reads its loader
            and sends its batches to the others, in host memory. The others' loaders are not iterated (their
            samplers still count what is consumed) and may be None.
        grad_accum_steps: Number of micro-batches in a window; None where ``global_batch`` says it.
        global_batch: Number of rows (of packs, where a batch is one) of a step over all ranks, in place of
            ``grad_accum_steps``: ``global_batch / (the loader's batch size * ranks with rows of their own)``
            micro-batches. Of rows the steps are the same on any number of ranks; packs are balanced anew.
        mesh: Mesh from ``build_mesh``, which says which ranks share rows; None takes the only one there is.
        map_fn: Function from what the loader yields to the batch that a window has, such as one that renames
            keys. It is called where the loader is read, and may not call other ranks.
        meter: Meter that counts the time in which this rank waits for its loader, and for other ranks.

    Yields:
        Lists of 1 to ``grad_accum_steps`` batches; the last one of an epoch may be short.

    Raises:
        ValueError: If ``grad_accum_steps`` is not positive, ``global_batch`` no multiple of what the ranks
            take at once, their batch sizes differ, or both or neither are given; if ``mesh`` is left out
            although this process has made several with different ``cp``; or if ``loader`` is None on a rank
            that has to read.
        BatchError: On all ranks, if a whole epoch has no batch, or if a sampler is moved in a pass.

    Collective: all ranks; each must ask for the same windows.

    Example:
        >>> [len(window) for window in fs.windows(loader, grad_accum_steps=3)]
        [3, 1]
    """
    if (grad_accum_steps is None) == (global_batch is None):
        raise ValueError("windows takes grad_accum_steps or global_batch: one of the two")
    group = row_group(mesh_of_job(mesh))
    if loader is None and (group is None or group.rank() == 0):
        raise ValueError("this rank reads for itself, or for its cp group, and needs a loader; got None")
    if _resumable(loader) is not None and not getattr(loader, "in_order", True):
        raise ValueError(
            "a DataLoader with in_order=False hands out batches as its workers finish them, and a resume "
            "counts those in front: rows would be left out, and others come twice. Leave in_order out"
        )
    if global_batch is not None:
        rows = check_count("global_batch", global_batch)
        with agreed("dividing the global batch", _one_number) as decision:
            decision.told = 0 if loader is None else _accumulated(loader, rows, group)
        grad_accum_steps = decision.result
    return _windows(loader, check_count("grad_accum_steps", grad_accum_steps), group, map_fn, meter)


def _one_number(everyone: list[int]) -> int:
    """The number of micro-batches, which ranks that read have said, and others say as 0."""
    said = {*everyone} - {0}
    if len(said) > 1:
        raise ValueError(
            f"global_batch makes windows of {' and '.join(map(str, sorted(said)))} micro-batches on ranks "
            "whose loaders have other batch sizes, and steps would have other rows: give all the same"
        )
    return said.pop()


def _accumulated(loader: Any, global_batch: int, group: dist.ProcessGroup | None) -> int:
    """Number of micro-batches that make up ``global_batch`` rows or packs over all ranks."""
    size = _taken_for_a_batch(
        loader, _resumable(loader) or getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    )
    if size is None or not hasattr(loader, "batch_sampler"):
        raise ValueError(
            f"global_batch needs a DataLoader whose batches have a known size, got {type(loader).__name__}: "
            "pass grad_accum_steps"
        )
    ranks = world_size() // (1 if group is None else group.size())
    if global_batch % (size * ranks):
        raise ValueError(
            f"global_batch={global_batch} is no multiple of {size * ranks}, which {ranks} ranks take at once "
            f"with a batch size of {size}: take a multiple, or another batch size"
        )
    return global_batch // (size * ranks)


def _windows(
    loader: Iterable[Any] | None,
    grad_accum_steps: int,
    group: dist.ProcessGroup | None,
    map_fn: Callable[[Any], Any] | None,
    meter: "ThroughputMeter | None",
) -> Generator[list[Any], None, None]:
    """``windows`` with checked arguments; the first rank of a ``group`` reads for all of it."""
    reads = group is None or group.rank() == 0
    sampler = _resumable(loader)
    mark_consumed = getattr(sampler, "mark_consumed", None)
    end_epoch = getattr(sampler, "end_epoch", None)
    waiting_for = nullcontext if meter is None else meter.waiting_for
    # A pass that resumes in the middle of an epoch may have no batch left, as a loader can drop the tail.
    in_mid_epoch = bool(getattr(sampler, "position", 0) or getattr(sampler, "is_passed_over", False))
    batches = begun_late(loader if loader is not None and reads else (), goes_on=in_mid_epoch)
    stands: Any = None
    while True:
        moved = stands is not None and _stands(sampler) != stands
        with ExitStack() as waiting, agreed("reading the next window", min) as decision:
            with waiting_for("data"), record_function("fsdp_sft.next_batches"):
                taken = list(itertools.islice(batches, grad_accum_steps))
            window = taken if map_fn is None else [map_fn(batch) for batch in taken]
            if moved and window:
                raise BatchError(
                    f"{type(sampler).__name__} was moved in the middle of a pass, from (epoch, position) "
                    f"{stands} to {_stands(sampler)}, by load_state_dict, set_epoch or mark_consumed: the "
                    "loader would go on with the rows of the old place, and its state count others. "
                    "windows() marks what is consumed; load a state or set an epoch before the pass, or "
                    "leave the loop and call windows(...) again"
                )
            # What is sent, and its count, may fail, and from here an error still reaches all ranks.
            sends = window if group is not None else []
            to_send = [pickle.dumps(to_device(batch, torch.device("cpu"))) for batch in sends]
            if sends and mark_consumed is not None:
                _num_consumed(loader, sampler, taken)
            decision.told = len(window) if reads else grad_accum_steps
            waiting.enter_context(waiting_for("ranks"))
            waiting.enter_context(record_function("fsdp_sft.wait_for_ranks"))
        length: int = decision.result
        if length == 0:
            break
        window = window[:length]
        consumed = _num_consumed(loader, sampler, taken[:length]) if reads and mark_consumed else None
        if group is not None:
            told = [(to_send[:length], consumed)]  # of the group's first rank
            dist.broadcast_object_list(told, group=group, group_src=0, device=torch.device("cpu"))
            sent, consumed = told[0]
            window = [pickle.loads(batch) for batch in sent]
        if mark_consumed is not None and consumed is not None:
            mark_consumed(consumed)
        stands = _stands(sampler)
        yield window
        if length < grad_accum_steps:
            break
    if end_epoch is not None and (stands is None or _stands(sampler) == stands):
        end_epoch()  # unless the caller has moved it, after the last window
    if stands is None and all_reduce_sum([in_mid_epoch])[0] == 0:
        raise BatchError("the epoch has no window: the loader of at least one rank has no batch")


def _resumable(loader: Any) -> Any:
    """Sampler, batch sampler, stream or loader that keeps the position; None if none does."""
    batches = getattr(loader, "batch_sampler", None)
    sources = (
        *(getattr(loader, "sampler", None), batches, getattr(loader, "dataset", None)),
        *(getattr(batches, "sampler", None), loader),
    )
    return next((source for source in sources if hasattr(source, "mark_consumed")), None)


def _stands(sampler: Any) -> tuple[Any, Any]:
    """(epoch, position in it) of a sampler or stream."""
    return getattr(sampler, "epoch", None), getattr(sampler, "position", None)


def _num_consumed(loader: Any, sampler: Any, window: list[Any]) -> int:
    """Number of rows or packs that the loader took for a window, in the unit that the sampler counts in.

    That can differ from the number of rows in the batches: a collator may have packed several into one or
    left some out, and a data set may return complete batches.
    """
    each = _taken_for_a_batch(loader, sampler)
    if each is None:
        return sum(num_rows(batch) for batch in window)
    return min(each * len(window), len(sampler) if isinstance(sampler, Sized) else each * len(window))


def _taken_for_a_batch(loader: Any, sampler: Any) -> int | None:
    """Rows or packs that a loader takes from its sampler or stream for each batch; None if unknown."""
    batches = getattr(loader, "batch_sampler", None)
    # A pack is a batch; with batch_size=None the data set returns a whole batch for each index.
    if sampler is batches or (isinstance(loader, DataLoader) and batches is None):
        return 1
    size = getattr(batches, "batch_size", None)
    counted_by_size = sampler in (getattr(batches, "sampler", None), getattr(loader, "dataset", None))
    return size if counted_by_size and isinstance(size, int) else None
