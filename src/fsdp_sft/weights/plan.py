"""What to read for each parameter and buffer, worked out from headers before any tensor is read."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from fsdp_sft._compat import (
    ignored_on_load,
    match_checkpoint_keys,
    run_conversion,
    tied_names,
    weight_conversions,
)
from fsdp_sft._model import meta_twin, named_tensors
from fsdp_sft.errors import CheckpointFormatError, MissingKeysError, UnexpectedKeysError, abridged
from fsdp_sft.weights.meta import matches_any
from fsdp_sft.weights.provenance import (
    Piece,
    Traced,
    UntraceableError,
    contiguous_strides,
    source,
)
from fsdp_sft.weights.resolve import Checkpoint
from fsdp_sft.weights.vocabulary import shapes_before_new_tokens

Kind = Literal["identity", "separable", "region", "other"]
KINDS: tuple[Kind, ...] = ("identity", "separable", "region", "other")

_MIN_RUN_BYTES = 512  # reading shorter runs one by one costs more than converting the whole tensor
_SMALL_BYTES = 1 << 20  # what is read in one go whatever its pieces look like


@dataclass(frozen=True)
class Target:
    """One parameter or buffer and where its elements are.

    Attributes:
        name: In the model; for tied weights, the one that the checkpoint has.
        shape: Global.
        kind: ``"identity"``: one tensor of the checkpoint as it is. ``"separable"``: whole tensors side by
            side (merged experts). ``"region"``: boxes of tensors. ``"other"``: converted whole, then cut.
        pieces: Empty for ``"other"``.
        group: Index into ``LoadPlan.groups`` for ``"other"``.
        is_parameter: And not a buffer.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    pieces: tuple[Piece, ...]
    group: int | None
    is_parameter: bool


@dataclass(frozen=True)
class ConvertedGroup:
    """Tensors that one conversion turns into others and that cannot be cut before.

    Attributes:
        first_target: Name that the conversion goes by.
        converter: transformers' ``WeightConverter``.
        sources: Keys in the checkpoint, in order, by source pattern.
        dtype: That the sources are cast to before converting, as transformers does.
    """

    first_target: str
    converter: Any
    sources: dict[str, list[str]]
    dtype: torch.dtype

    @property
    def keys(self) -> list[str]:
        """All keys in the checkpoint."""
        return [key for keys in self.sources.values() for key in keys]


@dataclass
class LoadPlan:
    """Everything a load does, the same on all ranks.

    Attributes:
        targets: To be written, by name.
        duplicates: Names whose tensor is tied to a target's; the checkpoint must hold the same values.
        groups: Conversions of whole tensors.
        missing: Names without a value in the checkpoint, that the model's class does not expect to be there.
        initialised: Names that the model's own initialisation fills.
        unexpected: Names (after renaming) that the model has no place for.
        class_bytes: Checkpoint bytes by kind of target.
        before: Name to shape of what has rows for new tokens, as it was without them.
        twin: See ``meta_twin``.
        conversions: transformers' list, the used ones marked.
    """

    targets: dict[str, Target] = field(default_factory=dict)
    duplicates: list[Target] = field(default_factory=list)
    groups: list[ConvertedGroup] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    initialised: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    class_bytes: dict[str, int] = field(default_factory=dict)
    before: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    twin: Any = None
    conversions: list[Any] = field(default_factory=list)

    @property
    def computed(self) -> list[str]:
        """Names of the buffers that no checkpoint holds."""
        return [name for name, _ in self.twin.named_non_persistent_buffers()]

    @property
    def short(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of the targets that the checkpoint has without the rows for new tokens."""
        return {name: t.shape for name, t in self.targets.items() if t.shape == self.before.get(name)}

    def digest(self, checkpoint: Checkpoint) -> str:
        """A fingerprint that two ranks share exactly if they would load the same."""
        hashed = hashlib.sha256(repr(checkpoint.file_bytes).encode())
        for key, tensor in sorted(checkpoint.sources.items()):
            hashed.update(repr((key, tensor.file, tensor.entry)).encode())
        for target in [*self.targets.values(), *self.duplicates]:
            hashed.update(repr(target).encode())
        hashed.update(repr((self.missing, self.initialised, self.unexpected, dict(self.before))).encode())
        hashed.update(repr([(group.first_target, group.sources) for group in self.groups]).encode())
        return hashed.hexdigest()


def make_plan(
    model: nn.Module, checkpoint: Checkpoint, *, missing: str = "error", unexpected: str = "error"
) -> LoadPlan:
    """Work out from the headers what each parameter and buffer of ``model`` is read from.

    Args:
        model: Meta or materialised, sharded or not; only names, shapes and ties are looked at.
        checkpoint: With its headers read.
        missing: ``"error"`` or ``"initialise"``.
        unexpected: ``"error"`` or ``"ignore"``.

    Raises:
        CheckpointFormatError: If a shape does not fit or a conversion fails.
        MissingKeysError: If keys are missing that the class does not let be missing, unless initialised.
        UnexpectedKeysError: If keys are left over that the class does not know of, unless ignored.
    """
    twin = meta_twin(model)
    tensors = named_tensors(model)
    _check_same_names(twin, tensors)
    plan = LoadPlan(twin=twin, conversions=weight_conversions(twin), before=shapes_before_new_tokens(model))
    matched, left_over = match_checkpoint_keys(twin, list(checkpoint.sources), plan.conversions)
    found: dict[str, Target] = {}
    for first, (converter, sources) in matched.items():
        for target in _targets_of(plan, checkpoint, tensors, first, converter, sources):
            if target.name in tensors:
                found[target.name] = target
            else:
                left_over[target.name] = first
    _resolve_ties(plan, model, tensors, found)
    _count_classes(plan, checkpoint)
    _settle_missing(plan, tensors, found, missing)
    _settle_unexpected(plan, left_over, unexpected)
    return plan


def _check_same_names(twin: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, expected in twin.state_dict().items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != expected.shape:
            shape = "no such tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise ValueError(
                f"the model has {shape} for {name!r}, but its config describes {tuple(expected.shape)}: "
                "was it changed after it was built? Load first, then change it, or change the config too"
            )


def _targets_of(
    plan: LoadPlan,
    checkpoint: Checkpoint,
    tensors: Mapping[str, torch.Tensor],
    first: str,
    converter: Any,
    sources: dict[str, list[str]],
) -> list[Target]:
    if converter is None:
        key = next(iter(sources.values()))[0]
        converted: dict[str, torch.Tensor] = {first: _traced(checkpoint, key)}
    else:
        converted = _converted(plan, checkpoint, first, converter, sources)
    whole: int | None = None
    if not all(_is_direct(tensor, checkpoint) for tensor in converted.values()):
        whole = len(plan.groups)
        plan.groups.append(ConvertedGroup(first, converter, sources, tensors[first].dtype))
    targets = []
    for name, tensor in converted.items():
        if name in tensors:
            keys = [key for keys in sources.values() for key in keys]
            _check_fits(name, tensors[name], tensor, keys, plan.before.get(name))
        shape, is_parameter = tuple(tensor.shape), isinstance(tensors.get(name), nn.Parameter)
        if whole is not None or not isinstance(tensor, Traced):
            targets.append(Target(name, shape, "other", (), whole, is_parameter))
        else:
            kind = _kind(tensor, checkpoint)
            targets.append(Target(name, shape, kind, tuple(tensor.pieces), None, is_parameter))
    return targets


def _traced(checkpoint: Checkpoint, key: str) -> Traced:
    entry = checkpoint.sources[key].entry
    return source(key, entry.shape, entry.dtype)


def _converted(
    plan: LoadPlan, checkpoint: Checkpoint, first: str, converter: Any, sources: dict[str, list[str]]
) -> dict[str, torch.Tensor]:
    """The results of a conversion without data: traced where it only moves elements, else shapes alone.

    Memory: Where it computes, the tensors of one conversion, before the shards have any.
    """

    def run(make: Any) -> dict[str, torch.Tensor]:
        made = {pattern: [make(key) for key in keys] for pattern, keys in sources.items()}
        return run_conversion(plan.twin, first, converter, made)

    def zeros(key: str) -> torch.Tensor:
        entry = checkpoint.sources[key].entry
        return torch.zeros(entry.shape, dtype=entry.dtype)

    try:
        try:
            return run(lambda key: _traced(checkpoint, key))
        except UntraceableError:
            # Not on the meta device: code that computes may mix in tensors of its own, or look at values.
            return {name: tensor.to("meta") for name, tensor in run(zeros).items()}
    except Exception as error:
        keys = [key for values in sources.values() for key in values]
        raise CheckpointFormatError(
            f"{converter} cannot make {first!r} from {abridged(keys)}: {error}"
        ) from None


def _check_fits(
    name: str,
    tensor: torch.Tensor,
    read: torch.Tensor,
    keys: list[str],
    before: tuple[int, ...] | None,
) -> None:
    if tensor.shape != read.shape and tuple(read.shape) != before:
        raise CheckpointFormatError(
            f"{name!r} has shape {tuple(tensor.shape)} in the model and {tuple(read.shape)} in the "
            f"checkpoint (from {abridged(keys)}); is this checkpoint of this model?"
        )
    scaled = read.dtype.itemsize == 1 or not read.dtype.is_floating_point
    if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and scaled:
        raise CheckpointFormatError(
            f"{name!r} is stored as {read.dtype} (from {abridged(keys)}): the checkpoint is quantised; "
            "load it with transformers, dequantize() it, and save that"
        )


def _is_direct(tensor: torch.Tensor, checkpoint: Checkpoint) -> bool:
    """Whether a part of a tensor can be read without reading much else."""
    return isinstance(tensor, Traced) and all(_is_readable(piece, checkpoint) for piece in tensor.pieces)


def _is_readable(piece: Piece, checkpoint: Checkpoint) -> bool:
    itemsize = checkpoint.sources[piece.key].entry.dtype.itemsize
    dims = [(size, step) for size, step in zip(piece.size, piece.stride, strict=True) if size > 1]
    span = 1 + sum((size - 1) * step for size, step in dims)
    if span * itemsize <= _SMALL_BYTES:
        return True
    if [step for _, step in dims] != sorted((step for _, step in dims), reverse=True):
        return False  # transposed: the rows of one shard are scattered over the whole source
    run = 1
    for size, step in reversed(dims):
        if step != run:
            break
        run *= size
    return run * itemsize >= _MIN_RUN_BYTES


def _kind(tensor: Traced, checkpoint: Checkpoint) -> Kind:
    def is_whole(piece: Piece) -> bool:
        shape = checkpoint.sources[piece.key].entry.shape
        count = 1
        for size in shape:
            count *= size
        return piece.numel == count and _strides_match(piece)

    if not all(is_whole(piece) for piece in tensor.pieces):
        return "region"
    return "identity" if len(tensor.pieces) == 1 else "separable"


def _strides_match(piece: Piece) -> bool:
    expected = contiguous_strides(piece.size)
    return all(a == b for a, b, n in zip(piece.stride, expected, piece.size, strict=True) if n > 1)


def _resolve_ties(
    plan: LoadPlan, model: nn.Module, tensors: Mapping[str, torch.Tensor], found: dict[str, Target]
) -> None:
    preferred = set(tied_names(model).values())
    aliases: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        aliases.setdefault(id(tensor), []).append(name)
    for names in aliases.values():
        present = sorted((name for name in names if name in found), key=lambda name: name not in preferred)
        if present:
            plan.targets[present[0]] = found[present[0]]
            plan.duplicates += [found[name] for name in present[1:]]
            for name in names:
                found.setdefault(name, found[present[0]])


def _count_classes(plan: LoadPlan, checkpoint: Checkpoint) -> None:
    def key_bytes(key: str) -> int:
        return checkpoint.sources[key].entry.num_bytes

    plan.class_bytes = dict.fromkeys(KINDS, 0)
    for target in plan.targets.values():
        for piece in target.pieces:
            itemsize = checkpoint.sources[piece.key].entry.dtype.itemsize
            plan.class_bytes[target.kind] += piece.numel * itemsize
    plan.class_bytes["other"] += sum(key_bytes(key) for group in plan.groups for key in group.keys)


def _settle_missing(
    plan: LoadPlan, tensors: Mapping[str, torch.Tensor], found: Mapping[str, Target], policy: str
) -> None:
    absent = [name for name in plan.twin.state_dict() if name not in found]
    first_names = {id(tensors[name]): name for name in reversed(absent)}
    allowed, _ = ignored_on_load(plan.twin)
    plan.missing = [name for name in absent if not matches_any(name, allowed)]
    plan.initialised = [name for name in absent if first_names[id(tensors[name])] == name]
    if plan.missing and policy == "error":
        raise MissingKeysError(
            f"the checkpoint has no values for {abridged(plan.missing)} of {type(plan.twin).__name__}; "
            "missing='initialise' fills them with the model's own initialisation"
        )


def _settle_unexpected(plan: LoadPlan, left_over: Mapping[str, str], policy: str) -> None:
    _, allowed = ignored_on_load(plan.twin)
    plan.unexpected = sorted(name for name in left_over if not matches_any(name, allowed))
    if plan.unexpected and policy == "error":
        raise UnexpectedKeysError(
            f"{type(plan.twin).__name__} has no place for {abridged(plan.unexpected)} of the checkpoint; "
            "unexpected='ignore' leaves them unread"
        )
