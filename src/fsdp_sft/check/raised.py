"""What a rank has raised in a check, told over the store at once: others may wait where no message comes."""

import re
from contextlib import suppress
from datetime import timedelta
from typing import Any

from fsdp_sft._compat.groups import default_store
from fsdp_sft._ranks.agree import is_distributed
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.errors import LostRankError, RemoteRankError

_KEY = "fsdp_sft/check/raised"
_ANSWERS = timedelta(seconds=5)
# Errors that say that another rank is gone: that one is to be named, and not who noticed.
_NOTICED = re.compile(
    r"connection (closed|reset)|broken pipe|socket closed|timed out|abort|remote process", re.I
)


class Raised:
    """The first error of all ranks that is not known to them all yet.

    Args:
        cluster: The ranks.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._is_ours = cluster, False
        self._store: Any = None

    def tell(self, error: BaseException) -> None:
        """Tell the others what this rank has raised, unless one has before, or another rank is the reason."""
        if isinstance(error, (LostRankError, RemoteRankError)) or _NOTICED.search(str(error)):
            return
        first = (str(error).strip().splitlines() or [""])[0]
        words = f"{self._cluster.on(self._cluster.rank)} raised {type(error).__name__}"
        text = f"{words}: {first}" if first else words
        if is_distributed():
            with suppress(RuntimeError):
                self._is_ours = self._connected().compare_set(_KEY, "", text).decode() == text

    def withdraw(self) -> None:
        """Take back what this rank has told, now that all know."""
        if self._is_ours:
            self._is_ours = False
            with suppress(RuntimeError):
                self._connected().delete_key(_KEY)

    def told(self) -> str:
        """What a rank has told: it, its host and its error; "" if nothing was."""
        if is_distributed():
            with suppress(RuntimeError):  # the store ends with its rank
                if self._connected().check([_KEY]):
                    return str(self._connected().get(_KEY).decode())
        return ""

    def _connected(self) -> Any:
        """The job's store, over a connection of its own: calls of one wait for each other."""
        if self._store is None:
            self._store = default_store().clone()
            self._store.set_timeout(_ANSWERS)
        return self._store
