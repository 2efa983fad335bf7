"""Options of encoding chat rows, and their checks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from fsdp_sft._process.words import answer
from fsdp_sft.collate.rows import ROLES

TrainOn = Literal["assistant", "last", "all"] | Iterable[str]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "train_reasoning": (True, False),
    "empty_reasoning": ("mask", "train"),
    "truncation": ("right", "left", "error"),
    "on_dropped": ("error", "count"),
}


class EncodeKeywords(TypedDict, total=False):
    """Options of `encode_chat` that the collator and the filter pass on to it."""

    train_on: TrainOn
    train_reasoning: bool
    empty_reasoning: str
    truncation: str
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True)
class EncodeOptions:
    """The options of `encode_chat`, checked once.

    Raises:
        ValueError: For the first option that is wrong.
    """

    train_on: TrainOn = "assistant"
    train_reasoning: bool = True
    empty_reasoning: str = "mask"
    max_length: int | None = None
    truncation: str = "right"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    on_dropped: str = "error"

    def __post_init__(self) -> None:
        if isinstance(self.train_on, str):
            check_choice("train_on", self.train_on, ("assistant", "last", "all"), "; give roles as a set")
        else:
            roles = set(self.train_on)
            if not roles or roles - set(ROLES):
                raise ValueError(f"train_on must be a set of roles out of {ROLES}, got {self.train_on!r}")
            object.__setattr__(self, "train_on", tuple(sorted(roles)))
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        if self.train_on == "all" and not self.train_reasoning:
            raise ValueError('train_reasoning=False contradicts train_on="all", which trains every token')
        if self.max_length is not None:
            check_count("max_length", self.max_length)


def options_of(function: str, options: Mapping[str, Any], **own: Any) -> EncodeOptions:
    """The options that a caller has given to a public function, and those that it knows itself.

    Raises:
        TypeError: For an option that does not exist; the message names the function.
        ValueError: For the first option that is wrong.
    """
    known = {field.name for field in fields(EncodeOptions)}
    for name in options.keys() - known:
        here = answer(name, known) or f"its options are {', '.join(sorted(known))}"
        raise TypeError(f"{function} takes no {name}=: {here}")
    return EncodeOptions(**options, **own)


def check_choice(name: str, value: Any, allowed: tuple[str, ...], hint: str = "") -> None:
    """Raise ValueError unless `value` is one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


def check_count(name: str, value: Any) -> int:
    """The value as an int; ValueError unless it is a positive integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return operator.index(value)
