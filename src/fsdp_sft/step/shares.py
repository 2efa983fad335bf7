"""Check, before a pass, how the ranks share the rows that their loaders read."""

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from torch.utils.data import BatchSampler, ConcatDataset, DistributedSampler, RandomSampler, Subset

from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.generators import unmoved
from fsdp_sft._ranks.agree import difference, is_distributed, this_rank, through_rank_0
from fsdp_sft.errors import BatchError
from fsdp_sft.sampling.sampler import Placed

# Epoch of the last complete pass of each of torch's samplers.
_passes: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Read:
    """What a rank's loader reads, as sent to rank 0.

    Attributes:
        alone: Whether it draws rows at random without regard to other ranks.
        order: What the order that ranks share depends on; None if they share none.
        place: This rank's place among those that share it.
        ends: A digest of the data set's length, first and last row; empty if it cannot be read.
        unread: Number of rows of the data set that the sampler does not know of.
        again: Whether a shuffled order is that of the last epoch.
    """

    alone: bool = False
    order: Mapping[str, Any] | None = None
    place: int = 0
    ends: str = ""
    unread: int = 0
    again: bool = False


def look_at_shares(loader: Any) -> None:
    """Refuse samplers that divide the rows by different orders; warn of what is probably a mistake.

    A loader that draws for itself (``DataLoader(shuffle=True)``) knows of no other ranks, which is right only
    for data sets that differ: if they are the same, an epoch has each row about once for each rank. Samplers
    that share rows need the same data, seed and position on all the ranks that share them: those of the job,
    or of a node with its own data.

    Args:
        loader: This rank's loader; None if it reads none.

    Raises:
        BatchError: If a sampler orders more rows than its loader has, or ranks share an order that differs.

    Collective: all ranks.
    """
    words: list[str] = through_rank_0("looking at what the ranks read", lambda: _told(loader), _judged)
    if this_rank() == 0:
        for text in words:
            warn_caller(text)


def sources_of(loader: Any) -> list[Any]:
    """What may say which rows a loader reads: its samplers, its data set if it is a stream, itself."""
    batches = getattr(loader, "batch_sampler", None)
    inner = getattr(batches, "sampler", None)
    return [getattr(loader, "sampler", None), batches, getattr(loader, "dataset", None), inner, loader]


def note_pass(loader: Any) -> None:
    """Remember that a pass over a loader has ended."""
    sampler = _ordering(loader)
    if type(sampler) is DistributedSampler:
        _passes[sampler] = sampler.epoch


def _told(loader: Any) -> dict[str, Any] | None:
    """What this rank knows of its loader; None if it is unknown how the loader draws rows."""
    sampler, data = _ordering(loader), getattr(loader, "dataset", None)
    if sampler is None:
        return None
    alone, torchs = type(sampler) is RandomSampler, type(sampler) is DistributedSampler
    order = None if alone else _order(sampler)
    # Workers that are forked would share what a data set opens when it is first read, such as a file.
    is_safe = not getattr(loader, "num_workers", 0) or _in_memory(data)
    ends = _ends(data) if is_distributed() and (alone or (order is not None and is_safe)) else ""
    again = torchs and sampler.shuffle and _passes.get(sampler) == sampler.epoch
    place = 0 if order is None else int(sampler.rank)
    return asdict(_Read(alone, order, place, ends, _unread(loader, sampler, data), again))


def _judged(everyone: list[dict[str, Any] | None]) -> list[str]:
    """Warnings of rank 0, given what all ranks know; raises for what cannot be meant."""
    told = [(rank, _Read(**own)) for rank, own in enumerate(everyone) if own is not None]
    sharing = [(rank, read) for rank, read in told if read.order is not None]
    apart = _incomplete(sharing, lambda read: repr(read.order))
    if apart:
        facts = difference([(rank, dict(read.order or {})) for rank, read in apart])
        raise BatchError(
            f"the samplers share one order of rows out, and it is not the same on all ranks: {facts}. Rows "
            "would be left out and others trained twice. Give every rank the whole data, the same options "
            "and the same state; for data of which each rank has its own part, pass num_replicas=1, rank=0"
        )
    shuffled = Counter(read.ends for _, read in told if read.alone and read.ends)
    words = [
        f"{number} ranks shuffle the same rows, each for itself (DataLoader(shuffle=True)): an epoch has "
        f"every row {number} times or so. Share them with DataLoader(sampler=ResumableSampler(rows)), or "
        "give each rank another part of the data. Ranks along tp, which have to have the same rows, get "
        "them by num_replicas= and rank="
        for number in shuffled.values()
        if number > 1
    ]
    if _incomplete([(rank, read) for rank, read in sharing if read.ends], lambda read: read.ends):
        words.append(
            "the ranks' data sets differ, and their samplers share out the rows of one: of each part only a "
            "share would be trained. Give every rank the whole data, or num_replicas=1, rank=0 to a sampler "
            "of its own part"
        )
    unread = max((read.unread for _, read in told), default=0)
    if unread:
        words.append(
            f"the sampler knows of {unread} rows fewer than the loader's data set has: they are never read. "
            "Make it over the data set that the loader gets"
        )
    if any(read.again for _, read in told):
        words.append(
            "DistributedSampler has the order of the last epoch again: call its set_epoch(epoch) before "
            "each, or take ResumableSampler, which goes on by itself"
        )
    return words


def _incomplete(sharing: list[tuple[int, _Read]], what: Callable[[_Read], str]) -> list[tuple[int, _Read]]:
    """A rank of each group with one ``what``, if there are several and one lacks a place; else nothing."""
    groups: dict[str, list[tuple[int, _Read]]] = {}
    for rank, read in sharing:
        groups.setdefault(what(read), []).append((rank, read))
    whole = all(
        len({read.place for _, read in group}) == (group[0][1].order or {})["num_replicas"]
        for group in groups.values()
    )
    return [] if whole or len(groups) < 2 else [group[0] for group in groups.values()]


def _ordering(loader: Any) -> Any:
    """Sampler or stream that decides which rows this rank reads; None if it is of no known kind."""
    for one in sources_of(loader):
        # A sampler of another library may be a DistributedSampler that lacks all that torch's own has.
        if isinstance(one, Placed) or type(one) is DistributedSampler:
            return one
    alone, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    # Batch samplers of other libraries may divide the rows of a random sampler among ranks.
    return alone if type(alone) is RandomSampler and type(batches) in (BatchSampler, type(None)) else None


def _order(sampler: Any) -> dict[str, Any] | None:
    """What the order that ranks share depends on; None if this rank shares its rows with no other."""
    if sampler.num_replicas == 1:
        return None
    own = {"sampler": type(sampler).__name__, "num_replicas": int(sampler.num_replicas)}
    if isinstance(sampler, Placed):
        return own | sampler.position_state()
    return own | {
        "num_rows": len(cast(Any, sampler.dataset)),
        "seed": int(sampler.seed),
        "shuffle": bool(sampler.shuffle),
        "epoch": int(sampler.epoch),
    }


def _unread(loader: Any, sampler: Any, data: Any) -> int:
    """Number of rows of the data that a sampler does not know of.

    Raises:
        BatchError: If it knows of more rows than there are.
    """
    batches = getattr(loader, "batch_sampler", None)
    if not (batches is None or batches is sampler or type(batches) is BatchSampler):
        return 0  # it may be of buckets, or of whatever else
    try:
        rows, there = _rows_of(sampler), len(data)
    except Exception:  # a stream, or a data set that does not say how long it is
        return 0
    if rows is None or rows <= there:
        return 0 if rows is None else there - rows
    raise BatchError(
        f"{type(sampler).__name__} was made for {rows} rows, and the loader's data set has {there}: make it "
        "over the data set that the loader gets (after filter_rows)"
    )


def _rows_of(sampler: Any) -> int | None:
    """Number of rows that a sampler orders; None if it does not say so."""
    if not isinstance(sampler, Placed):
        data: Any = sampler.dataset if type(sampler) is DistributedSampler else sampler.data_source
        return len(data)
    state = sampler.position_state()
    sizes: list[int] | None = state.get("sizes")
    rows: int | None = state.get("num_rows") if sizes is None else sum(sizes)
    return rows


def _in_memory(data: Any) -> bool:
    """Whether rows of a data set can be read here without opening anything that workers would share."""
    if isinstance(data, Subset):
        return _in_memory(data.dataset)
    if isinstance(data, ConcatDataset):
        return all(map(_in_memory, data.datasets))
    return isinstance(data, Sequence) or type(data).__module__.partition(".")[0] == "datasets"


def _ends(data: Any) -> str:
    """A digest of the data's length, first and last row; empty if it cannot be read, or differs each time."""
    try:
        with unmoved([]):
            once, again = (repr((len(data), data[0], data[len(data) - 1])) for _ in range(2))
    except Exception:  # the caller's data may be of any kind; the loader itself says what is wrong with it
        return ""
    # The address of an object differs between ranks.
    is_of_content = once == again and " at 0x" not in once
    return hashlib.sha256(once.encode()).hexdigest() if is_of_content else ""
