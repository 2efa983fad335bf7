"""How the ranks share the rows that their loaders read: one look before a pass over them."""

import hashlib
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from fsdp_sft._agree import difference, is_distributed, this_rank, through_rank_0
from fsdp_sft.errors import BatchError
from fsdp_sft.sampler import Placed

_SHARING = (Placed, DistributedSampler)
_ALONE = {
    RandomSampler: ("shuffle the same rows", "DataLoader(shuffle=True)"),
    SequentialSampler: ("read the same rows", "a DataLoader without a sampler"),
}
# The epoch of the last whole pass that a sampler of torch's has ordered.
_passes: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Read:
    """What a rank's loader reads, as ranks tell it to each other.

    Attributes:
        alone: How it draws rows without a word to other ranks, for a message; empty if it does not.
        order: What the order depends on that ranks share, the same on all of them; empty if they share none.
        ends: A digest of the data set's length and ends; empty if it cannot be read.
        unread: Number of rows of the data set that the sampler does not know of.
        again: Whether the order is that of the last epoch, although each is to have its own.
    """

    alone: tuple[str, ...] = ()
    order: Mapping[str, Any] | None = None
    ends: str = ""
    unread: int = 0
    again: bool = False


def look_at_shares(loader: Any) -> None:
    """Refuse ranks that do not share one order of rows, although their samplers do; warn of what is odd.

    A loader that draws for itself (``DataLoader(shuffle=True)``, or one without a sampler) knows of no other
    ranks: an epoch then has each row once for each rank. Of data sets that differ, each is rightly drawn
    alone. Samplers that share rows need the same data, seed and position on every rank.

    Args:
        loader: This rank's loader; None if it reads none.

    Raises:
        BatchError: If a sampler orders more rows than its loader has, or ranks share an order that differs.

    Collective: all ranks.
    """
    words: list[str] = through_rank_0("looking at what the ranks read", lambda: _told(loader), _judged)
    if this_rank() == 0:
        for text in words:
            warnings.warn(text, stacklevel=4)


def note_pass(loader: Any) -> None:
    """Note that a pass over a loader has come to its end."""
    sampler = _ordering(loader)
    if type(sampler) is DistributedSampler:
        _passes[sampler] = sampler.epoch


def _told(loader: Any) -> dict[str, Any] | None:
    """What this rank tells of its loader; None if nothing is known of how it draws rows."""
    sampler, data = _ordering(loader), getattr(loader, "dataset", None)
    if sampler is None:
        return None
    alone = _ALONE.get(type(sampler), ())
    order = None if alone else _order(sampler)
    # Workers that are forked would share what a data set opens when it is first read, such as a file.
    is_safe = not getattr(loader, "num_workers", 0) or _in_memory(data)
    reads = is_distributed() and (is_safe or type(sampler) is RandomSampler)
    again = type(sampler) is DistributedSampler and sampler.shuffle and _passes.get(sampler) == sampler.epoch
    return asdict(_Read(alone, order, _ends(data) if reads else "", _unread(sampler, data), again))


def _judged(everyone: list[dict[str, Any] | None]) -> list[str]:
    """What rank 0 warns of, given what all ranks have told; raises for what cannot be meant."""
    told = [(rank, _Read(**own)) for rank, own in enumerate(everyone) if own is not None]
    sharing = [(rank, dict(read.order)) for rank, read in told if read.order is not None]
    apart = difference(sharing) if sharing else ""
    if apart:
        raise BatchError(
            f"the samplers share one order of rows out, and it is not the same on all ranks: {apart}. Rows "
            "would be left out and others trained twice. Give every rank the whole data, the same options "
            "and the same state; for data of which each rank has its own part, pass num_replicas=1, rank=0"
        )
    words = []
    for (how, kind, _), number in Counter((*r.alone, r.ends) for _, r in told if r.alone and r.ends).items():
        if number > 1:
            words.append(
                f"{number} ranks {how}, each for itself ({kind}): an epoch has every row {number} times or "
                "so. Share them with DataLoader(sampler=ResumableSampler(rows)), or give each rank another "
                "part of the data. Ranks along tp, which have to have the same rows, get them by "
                "num_replicas= and rank="
            )
    if len({read.ends for _, read in told if read.order is not None and read.ends}) > 1:
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


def _ordering(loader: Any) -> Any:
    """The sampler, or the stream, that says which rows this rank reads; None if it is of no known kind."""
    batches = getattr(loader, "batch_sampler", None)
    inner = getattr(loader if batches is None else batches, "sampler", None)
    for one in (batches, inner, getattr(loader, "dataset", None), loader):
        if isinstance(one, _SHARING):
            return one
    # Batch samplers of other libraries may share out what a sequential sampler gives them.
    return inner if type(inner) in _ALONE and type(batches) in (BatchSampler, type(None)) else None


def _order(sampler: Any) -> dict[str, Any] | None:
    """What an order depends on that ranks share; None if this rank shares its rows with no other."""
    if sampler.num_replicas == 1:
        return None
    own = {"num_replicas": sampler.num_replicas}
    if isinstance(sampler, DistributedSampler):
        rows = len(sampler.dataset)  # type: ignore[arg-type]
        return {**own, "num_rows": rows, "seed": sampler.seed, "shuffle": sampler.shuffle} | {
            "epoch": sampler.epoch
        }
    return own | _state_of(sampler)


def _state_of(sampler: Any) -> dict[str, Any]:
    """The state of one of our samplers or streams."""
    with warnings.catch_warnings():  # of rows that were drawn and not counted it warns where it is saved
        warnings.simplefilter("ignore")
        return dict(sampler.state_dict())


def _unread(sampler: Any, data: Any) -> int:
    """Number of rows of the data that a sampler does not know of.

    Raises:
        BatchError: If it knows of more rows than there are.
    """
    try:
        rows, there = _rows_of(sampler), len(data)
    except TypeError:  # a stream
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
        return len(getattr(sampler, "dataset", getattr(sampler, "data_source", None)))  # type: ignore[arg-type]
    state = _state_of(sampler)
    return sum(state["sizes"]) if "sizes" in state else state.get("num_rows")


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
        once, again = (repr((len(data), data[0], data[len(data) - 1])) for _ in range(2))
    except Exception:  # the caller's data may be of any kind; the loader itself says what is wrong with it
        return ""
    return hashlib.sha256(once.encode()).hexdigest() if once == again else ""
