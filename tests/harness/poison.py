"""Memory that nobody has written to holds NaN, so that a tensor that a load forgets cannot pass for right."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned() -> Iterator[None]:
    """Let ``empty``, ``empty_like`` and ``to_empty`` give NaN (and the largest integer) in this process.

    ``torch.utils.deterministic.fill_uninitialized_memory`` is on by default, but only counts together with
    deterministic algorithms. They are asked for with a warning in place of an error, so that no operation is
    refused. What ranks are given to do inside does the same.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all(), "this torch does not fill fresh memory"
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


# Whether fresh memory holds NaN now.
is_poisoned = torch.are_deterministic_algorithms_enabled
