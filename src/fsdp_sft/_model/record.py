"""What the library knows of each model: one record, as torch's FSDP2 has one state for each module.

What was done to a model (the mesh that it was sharded on, how its experts are placed) and what was found out
about it (which implementation computes its loss, that it does not mix the rows of a pack) are kept as long as
the model lives.

A record belongs to the model inside any wrappers. A copied or unpickled model has none.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from fsdp_sft._model.wrappers import unwrapped

T = TypeVar("T")


# An attribute of the model: in a global dict, a hook that refers to its model would keep it alive.
_NAME = "_fsdp_sft_record"

SAC = "_fsdp_sft_sac"  # attribute of a module that apply_sac has changed; copied and pickled with it


@dataclass
class Checkpointed:
    """What ``apply_sac`` has changed in a module.

    Attributes:
        replaced: The module's own attributes that were replaced.
        is_offloaded: Whether it is a block whose inputs wait on the host.
        caches: Of the model: configs whose ``use_cache`` was turned off.
        hook: Of the model: handle of the hook that refuses caches.
        kept: Of the model: FQNs of the blocks that keep some of their outputs.
    """

    replaced: dict[str, Any] = field(default_factory=dict)
    is_offloaded: bool = False
    caches: list[Any] = field(default_factory=list)
    hook: Any = None
    kept: list[str] = field(default_factory=list)


def checkpointed(module: nn.Module) -> Checkpointed:
    """What ``apply_sac`` has changed in a module; an empty one if it has changed nothing."""
    return module.__dict__.get(SAC) or Checkpointed()


class Record:
    """What is known of one model.

    Attributes:
        mesh: The mesh on which it was sharded; that of its parameters has no ``cp``.
        frozen_towers: FQNs of the towers that were frozen.
        config: Fields of its config when it was built.
        is_divided_once: Whether its gradients were found to be divided by the ranks once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._kept: dict[type, Any] = {}  # one value per class, which belongs to the package that uses it
        self.mesh: Any = None
        self.frozen_towers: tuple[str, ...] = ()
        self.config: dict[str, Any] | None = None
        self.is_divided_once = False

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    def keep(self, value: Any) -> None:
        """Remember ``value`` as long as the model lives, replacing one of the same class."""
        self._kept[type(value)] = value

    def kept(self, kind: type[T]) -> T | None:
        """The value of that class; None if there is none."""
        return self._kept.get(kind)

    def kept_or_new(self, kind: type[T]) -> T:
        """The value of that class, made without arguments if there is none."""
        return self._kept.setdefault(kind, kind())  # type: ignore[no-any-return]


def record_of(model: nn.Module) -> Record:
    """The record of a model, wrapped or not."""
    inner = unwrapped(model)
    record: Record | None = inner.__dict__.get(_NAME)
    if record is None or record._model() is not inner:  # a copy's
        record = inner.__dict__[_NAME] = Record(inner)
    return record


def known_of(model: nn.Module) -> Record:
    """The record of a model to look at; an empty one, which is not kept, if there is none."""
    inner = unwrapped(model)
    return record_of(inner) if _NAME in inner.__dict__ else Record(inner)


def kept_of(model: nn.Module, kind: type[T]) -> T | None:
    """The value of that class kept for a model; None, and no record is made, if there is none."""
    return known_of(model).kept(kind)
