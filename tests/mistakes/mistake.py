"""One mistake that the tests have to notice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """``old`` in a file, by its path from the package, becomes ``new``; one of the tests has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
