"""What a check is, and what it finds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fsdp_sft.check.cluster import Cluster

Level = Literal["fail", "warn"]


@dataclass(frozen=True)
class Trouble:
    """Something that is wrong.

    Attributes:
        level: ``"fail"``: the job would fail, or train wrongly or slowly. ``"warn"``: worth a look.
        ranks: The ranks that have it; () if it is not of single ranks.
        text: What is wrong and what to do, in words that follow the ranks and their nodes.
        leave_out: Whether the job would be well without the nodes of these ranks.
    """

    level: Level
    ranks: tuple[int, ...]
    text: str
    leave_out: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a check says; the same on all ranks.

    Attributes:
        said: What was seen, in a few words.
        troubles: What is wrong.
        measured: Plain values, for ``check.json``.
        unseen: Why the check, or a part of it, cannot be seen here; "" if all could.
    """

    said: str = ""
    troubles: tuple[Trouble, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    unseen: str = ""


@dataclass(frozen=True)
class Check:
    """One check. A file of ``checks/`` that has one by the name of ``CHECK`` is run.

    Attributes:
        name: In one word, for the table.
        asks: The question that it answers, in a line.
        order: Checks run in ascending order: what names a broken machine comes first.
        seconds: Its part of the 120 seconds of all checks together.
        run: What it does, on all ranks. It may raise: the others then raise the same error if it was raised
            inside ``agreed`` or ``through_rank_0``, and the error becomes a trouble of its rank.
    """

    name: str
    asks: str
    order: int
    seconds: float
    run: "Callable[[Cluster], Outcome]"
