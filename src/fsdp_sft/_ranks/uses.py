"""What all ranks do several times over one store, told apart."""

from typing import Any


def use_of(store: Any, what: str, rank: int) -> int:
    """The number of times, this one included, that a rank has done something over a store.

    Ranks do it in the same order over the same store, so all get the same number. A process's own count would
    be another where a rank was replaced, or has done it over other stores.
    """
    return int(store.add(f"{what}-of-{rank}", 1))
