"""What the checks found, as a table for a person, as JSON, and as an exit code."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_sft._process.devices import device_name
from fsdp_sft._ranks.words import ranks_named, said_ranks
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.mechanism import Check, Level, Outcome, Trouble
from fsdp_sft.errors import abridged, printable

_WIDTH = 110


@dataclass(frozen=True)
class Finished:
    """A check that is done.

    Attributes:
        check: The check.
        outcome: What it says.
        seconds: How long it took.
    """

    check: Check
    outcome: Outcome
    seconds: float

    @property
    def verdict(self) -> str:
        """``"FAIL"``, ``"warn"``, ``"-"`` for what cannot be seen here, or ``"ok"``."""
        levels = {trouble.level for trouble in self.outcome.troubles}
        if levels:
            return "FAIL" if "fail" in levels else "warn"
        return "-" if self.outcome.unseen and not self.outcome.said else "ok"


def is_wrong(done: Sequence[Finished]) -> bool:
    """Whether a check has failed."""
    return any(one.verdict == "FAIL" for one in done)


def hosts_to_leave_out(cluster: Cluster, troubles: Sequence[Trouble]) -> list[str]:
    """Nodes without which the job would be well; none if that would be all of them."""
    ranks = {rank for one in troubles if one.level == "fail" and one.leave_out for rank in one.ranks}
    hosts = cluster.hosts_of(tuple(ranks))
    return hosts if len(hosts) < cluster.num_hosts else []


def text_of(
    cluster: Cluster, done: Sequence[Finished], stopped_text: str, troubles: Sequence[Trouble], seconds: float
) -> str:
    """The table: what is wrong first, each with its ranks and nodes, then a line for each check.

    Args:
        cluster: The ranks.
        done: What was checked.
        stopped_text: Why the sequence ended early; "" if it did not.
        troubles: All that is wrong, the worst first.
        seconds: What all of it took.
    """
    ranks = f"{cluster.world_size} rank{'s' * (cluster.world_size > 1)}"
    nodes = f" on {cluster.num_hosts} nodes" if cluster.num_hosts > 1 else f" on {cluster.hosts[0]}"
    context = cluster.context
    lines = [
        f"fsdp-sft check: {ranks}{nodes}, {context.device.type}, {context.backend}, {seconds:.0f} s",
        "",
        *_troubles(cluster, troubles),
        *_table(done),
        "",
    ]
    lines.append(_summary(done, troubles, bool(stopped_text)))
    hosts = hosts_to_leave_out(cluster, troubles)
    if hosts:
        lines.append(f"To leave the node{'s' * (len(hosts) > 1)} out: --exclude={','.join(hosts)}")
    return printable("\n".join(lines))


def ordered(troubles: Sequence[Trouble]) -> list[Trouble]:
    """Failures before warnings, in the order in which they were found; the same one of several ranks once."""
    merged: dict[tuple[Level, str, bool], set[int]] = {}
    for one in troubles:
        merged.setdefault((one.level, one.text, one.leave_out), set()).update(one.ranks)
    found = [
        Trouble(level, tuple(sorted(ranks)), text, leave_out)
        for (level, text, leave_out), ranks in merged.items()
    ]
    return sorted(found, key=lambda one: one.level != "fail")


def to_json(
    cluster: Cluster, done: Sequence[Finished], stopped_text: str, troubles: Sequence[Trouble], seconds: float
) -> dict[str, Any]:
    """The results in JSON types."""
    wrong = bool(stopped_text) or any(one.level == "fail" for one in troubles)
    return {
        "format": "fsdp-sft check 1",
        "healthy": not wrong,
        "world_size": cluster.world_size,
        "hosts": cluster.hosts,
        "device_type": cluster.device.type,
        "device": device_name(cluster.device) or cluster.device.type,
        "backend": cluster.context.backend,
        "launcher": cluster.context.launcher,
        "seconds": round(seconds, 2),
        "stopped": stopped_text or None,
        "exclude": hosts_to_leave_out(cluster, troubles),
        "troubles": [
            {
                "level": one.level,
                "ranks": list(one.ranks),
                "hosts": cluster.hosts_of(one.ranks),
                "text": one.text,
            }
            for one in troubles
        ],
        "checks": {
            one.check.name: {
                "asks": one.check.asks,
                "verdict": one.verdict.lower() if one.verdict != "-" else "unseen",
                "seconds": round(one.seconds, 2),
                "said": one.outcome.said,
                "unseen": one.outcome.unseen or None,
                "measured": one.outcome.measured,
            }
            for one in done
        },
    }


def whose(cluster: Cluster, ranks: Sequence[int]) -> str:
    """Ranks and their nodes in words."""
    if not ranks:
        return "all ranks"
    return f"{said_ranks(ranks)} on {abridged(cluster.hosts_of(tuple(ranks)))}"


def _troubles(cluster: Cluster, troubles: Sequence[Trouble]) -> Iterator[str]:
    for one in troubles:
        head = "FAIL  " if one.level == "fail" else "warn  "
        # Why a rank was lost begins with the rank itself.
        text = one.text if ranks_named(one.text[:10]) else f"{whose(cluster, one.ranks)}: {one.text}"
        yield from textwrap.wrap(
            text, _WIDTH, initial_indent=head, subsequent_indent=" " * 6, break_long_words=False
        )
    if troubles:
        yield ""


def _table(done: Sequence[Finished]) -> Iterator[str]:
    width = max((len(one.check.name) for one in done), default=0)
    for one in done:
        outcome = one.outcome
        said = "; ".join(
            filter(None, (outcome.said, f"not seen: {outcome.unseen}" if outcome.unseen else ""))
        )
        head = f"{one.verdict:<4}  {one.check.name:<{width}}  {one.seconds:5.1f} s  "
        yield from textwrap.wrap(
            said or "see above", _WIDTH, initial_indent=head, subsequent_indent=" " * len(head)
        ) or [head]


def _summary(done: Sequence[Finished], troubles: Sequence[Trouble], is_stopped: bool) -> str:
    failed = [one.check.name for one in done if one.verdict == "FAIL"]
    warned = sum(one.level == "warn" for one in troubles)
    if is_stopped:
        return "Something is wrong, and the checks did not come to their end."
    if failed:
        return f"Something is wrong: {', '.join(failed)}."
    unseen = [one.check.name for one in done if one.verdict == "-"]
    noted = f", {warned} warning{'s' * (warned > 1)}" if warned else ""
    left = f"; not seen here: {', '.join(unseen)}" if unseen else ""
    return f"Healthy{noted}{left}."
