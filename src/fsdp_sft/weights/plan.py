"""The plan of a load, from the headers alone: what to read for each parameter and buffer."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from fsdp_sft._compat.conversions import (
    ignored_on_load,
    match_checkpoint_keys,
    run_conversion,
    weight_conversions,
)
from fsdp_sft._compat.models import tied_names
from fsdp_sft._model.named import named_tensors
from fsdp_sft._model.twin import meta_twin
from fsdp_sft._quantised.settings import IN_16_BITS
from fsdp_sft._tensors.packed import Packed
from fsdp_sft._tensors.stored import Piece, is_row_major
from fsdp_sft.errors import CheckpointFormatError, abridged
from fsdp_sft.weights.meta import matches_any
from fsdp_sft.weights.provenance import Traced, UntraceableError, source
from fsdp_sft.weights.resolve import Checkpoint
from fsdp_sft.weights.vocabulary import shapes_before_new_tokens

Kind = Literal["identity", "separable", "region", "other"]
KINDS: tuple[Kind, ...] = ("identity", "separable", "region", "other")

_MIN_RUN_BYTES = 512  # reading shorter runs one by one costs more than converting the whole tensor
_SMALL_BYTES = 1 << 20  # a piece that spans no more than this is read in one go, whatever its strides


@dataclass(frozen=True)
class Target:
    """One parameter or buffer, and where its elements are stored.

    Attributes:
        name: Name in the model; for tied weights, the one of their names that the checkpoint has.
        shape: Global shape, before sharding.
        kind: ``"identity"``: one tensor of the checkpoint as it is. ``"separable"``: whole tensors side by
            side (merged experts). ``"region"``: boxes of tensors. ``"other"``: tensors that have to be
            converted as a whole, and cut afterwards.
        pieces: Boxes of stored tensors that make up the target; empty for ``"other"``.
        group: Index into ``LoadPlan.groups`` for ``"other"``; None for the other kinds.
        is_parameter: Whether it is a parameter and not a buffer.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    pieces: tuple[Piece, ...]
    group: int | None
    is_parameter: bool


@dataclass(frozen=True)
class ConvertedGroup:
    """Stored tensors that one conversion needs as a whole, since it computes with their elements.

    Attributes:
        first_target: Name of the first tensor that the conversion makes, which identifies it.
        converter: transformers' ``WeightConverter``.
        sources: Keys in the checkpoint, in order, by source pattern.
        dtype: Dtype to which the sources are cast before they are converted, as transformers does.
    """

    first_target: str
    converter: Any
    sources: dict[str, list[str]]
    dtype: torch.dtype

    @property
    def keys(self) -> list[str]:
        """Keys of all sources in the checkpoint."""
        return [key for keys in self.sources.values() for key in keys]


@dataclass
class LoadPlan:
    """Everything that a load does, the same on all ranks.

    Attributes:
        targets: Parameters and buffers to fill from the checkpoint, by name.
        duplicates: Further names, in the checkpoint, of tensors that are tied to a target; what is stored
            under them must have the target's values.
        groups: Conversions that need their sources as a whole.
        missing: Names for which the checkpoint has no values, although the model's class does not allow them
            to be missing.
        initialised: Names that the model's own initialisation fills.
        unexpected: Names (after renaming) that the model has no place for.
        class_bytes: Bytes of the checkpoint by kind of target.
        before: Shapes in the checkpoint of the tensors that get rows for new tokens, by name.
        conversions: transformers' list of conversions, in which those that were used are marked.
    """

    twin: Any
    targets: dict[str, Target] = field(default_factory=dict)
    duplicates: list[Target] = field(default_factory=list)
    groups: list[ConvertedGroup] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    initialised: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    class_bytes: dict[str, int] = field(default_factory=dict)
    before: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    conversions: list[Any] = field(default_factory=list)

    @property
    def computed(self) -> list[str]:
        """Names of the buffers that no checkpoint holds."""
        return [name for name, _ in self.twin.named_non_persistent_buffers()] if self.twin is not None else []

    @property
    def short(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the targets that the checkpoint stores without the rows for new tokens, by name."""
        return {name: t.shape for name, t in self.targets.items() if t.shape == self.before.get(name)}

    def digest(self, checkpoint: Checkpoint) -> str:
        """A fingerprint that is equal on two ranks exactly if they would load the same."""
        hashed = hashlib.sha256(repr(list(checkpoint.file_bytes.values())).encode())
        numbers = {
            file: number for number, file in enumerate(checkpoint.file_bytes)
        }  # paths differ between nodes
        for key, tensor in sorted(checkpoint.sources.items()):
            runs = [(numbers[run.file], run.start, run.num_bytes) for run in tensor.all_runs()]
            hashed.update(repr((key, tensor.format, tensor.entry, runs)).encode())
        for target in [*self.targets.values(), *self.duplicates]:
            hashed.update(repr(target).encode())
        hashed.update(repr((self.missing, self.initialised, self.unexpected, dict(self.before))).encode())
        hashed.update(repr([(group.first_target, group.sources) for group in self.groups]).encode())
        return hashed.hexdigest()


def make_plan(
    model: nn.Module, checkpoint: Checkpoint, *, missing: str = "error", unexpected: str = "error"
) -> LoadPlan:
    """Plan, from the headers, what each parameter and buffer of ``model`` is read from.

    Args:
        model: The model, on the meta device or not, sharded or not. Only its names, shapes and ties count.
        checkpoint: The files, with their headers read.
        missing: ``"error"`` or ``"initialise"``; see ``load_weights``.
        unexpected: ``"error"`` or ``"ignore"``; see ``load_weights``.

    Raises:
        CheckpointFormatError: If a shape does not fit or a conversion fails. Also, unless ``missing`` and
            ``unexpected`` allow it, if keys are missing that the model's class does not allow to be missing,
            or left over that it does not name as ignorable; the error has their names.
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
    _settle_missing(plan, tensors, found)
    _refuse_missing(plan, checkpoint, left_over, missing)
    _settle_unexpected(plan, left_over, unexpected)
    return plan


def _check_same_names(twin: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose tensors are not those that its config describes."""
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
    """The targets of one conversion, or of one tensor that is only renamed (``converter`` is None)."""
    if converter is None:
        key = next(iter(sources.values()))[0]
        converted: dict[str, torch.Tensor] = {first: _traced(checkpoint, key)}
    else:
        converted = _converted(plan, checkpoint, first, converter, sources)
    # One result that cannot be read by boxes makes the conversion run on whole tensors, for all its results.
    whole: int | None = None
    if converter is not None and not all(_is_direct(tensor, checkpoint) for tensor in converted.values()):
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
    """A stored tensor as a traced one."""
    entry = checkpoint.sources[key].entry
    return source(key, entry.shape, entry.dtype, entry.stride)


def _converted(
    plan: LoadPlan, checkpoint: Checkpoint, first: str, converter: Any, sources: dict[str, list[str]]
) -> dict[str, torch.Tensor]:
    """The results of a conversion, without data: traced if it only moves elements, else shapes and dtypes.

    Memory: For a conversion that computes, the tensors of that conversion. The shards have no memory yet.
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
            # Zeros, not meta tensors: code that computes may look at values or combine them with CPU tensors.
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
    """Refuse a stored tensor that is quantised, or of another shape than the model's."""
    if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and is_scaled(read.dtype):
        raise CheckpointFormatError(
            f"{name!r} is stored as {read.dtype} (from {abridged(keys)}): it is quantised, and its "
            f"config does not say how: {IN_16_BITS}"
        )
    if tensor.shape != read.shape and tuple(read.shape) != before:
        raise CheckpointFormatError(
            f"{name!r} has shape {tuple(tensor.shape)} in the model and {tuple(read.shape)} in the "
            f"checkpoint (from {abridged(keys)}); is this checkpoint of this model?"
        )


def _is_direct(tensor: torch.Tensor, checkpoint: Checkpoint) -> bool:
    """Whether any part of a tensor can be read without reading much else of the file."""
    return isinstance(tensor, Traced) and all(_is_readable(piece, checkpoint) for piece in tensor.pieces)


def _is_readable(piece: Piece, checkpoint: Checkpoint) -> bool:
    """Whether a piece is small, or consists of contiguous runs in the file that are worth one read each."""
    if isinstance(checkpoint.sources[piece.key], Packed):
        return True  # by rows, whatever its strides
    itemsize = checkpoint.sources[piece.key].entry.dtype.itemsize
    if piece.span * itemsize <= _SMALL_BYTES:
        return True
    dims = [(size, step) for size, step in zip(piece.size, piece.stride, strict=True) if size > 1]
    if [step for _, step in dims] != sorted((step for _, step in dims), reverse=True):
        return False  # transposed: each row of the shard takes elements from all over the source
    run = 1  # contiguous elements, counted from the innermost dimension outwards
    for size, step in reversed(dims):
        if step != run:
            break
        run *= size
    return run * itemsize >= _MIN_RUN_BYTES


def _kind(tensor: Traced, checkpoint: Checkpoint) -> Kind:
    """The kind of a traced target; see ``Target.kind``."""

    def is_whole(piece: Piece) -> bool:
        numel = math.prod(checkpoint.sources[piece.key].entry.shape)
        return piece.numel == numel and is_row_major(piece.size, piece.stride)

    if not all(is_whole(piece) for piece in tensor.pieces):
        return "region"
    return "identity" if len(tensor.pieces) == 1 else "separable"


def _resolve_ties(
    plan: LoadPlan, model: nn.Module, tensors: Mapping[str, torch.Tensor], found: dict[str, Target]
) -> None:
    """Fill each tensor from one of its names, and keep its further names for the comparison."""
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
    """Count the bytes of the checkpoint by kind of target."""
    plan.class_bytes = dict.fromkeys(KINDS, 0)
    for target in plan.targets.values():
        for piece in target.pieces:
            entry = checkpoint.sources[piece.key].entry
            plan.class_bytes[target.kind] += entry.num_bytes * piece.numel // max(1, math.prod(entry.shape))
    whole = [checkpoint.sources[key].entry for group in plan.groups for key in group.keys]
    plan.class_bytes["other"] += sum(entry.num_bytes for entry in whole)


def _settle_missing(
    plan: LoadPlan,
    tensors: Mapping[str, torch.Tensor],
    found: Mapping[str, Target],
) -> None:
    """Note which tensors the checkpoint does not fill."""
    absent = [name for name in plan.twin.state_dict() if name not in found]
    # Tied names are one tensor, which is initialised once, under the first of them.
    first_names = {id(tensors[name]): name for name in reversed(absent)}
    allowed, _ = ignored_on_load(plan.twin)
    plan.missing = [name for name in absent if not matches_any(name, allowed)]
    plan.initialised = [name for name in absent if first_names[id(tensors[name])] == name]


def _refuse_missing(
    plan: LoadPlan, checkpoint: Checkpoint, left_over: Mapping[str, str], policy: str
) -> None:
    """Refuse missing values, if that is an error; in any case those that are stored in a quantised form."""
    stored = {name: checkpoint.sources.get(key) for name, key in left_over.items()}
    refuse_packed(plan.missing, {name: kept.entry.dtype for name, kept in stored.items() if kept is not None})
    within = tuple(f"{name.rpartition('.')[0]}." for name in plan.missing if "." in name)
    unplaced = sorted(
        name for name, kept in stored.items() if isinstance(kept, Packed) and name.startswith(within)
    )
    if unplaced:
        raise CheckpointFormatError(
            f"the checkpoint has no values for {abridged(plan.missing)}, and quantised ones under names that "
            f"transformers has no place for ({abridged(unplaced)}): {IN_16_BITS}"
        )
    if plan.missing and policy == "error":
        other = f"it has {abridged(sorted(left_over))}, which the model lacks; " if left_over else ""
        raise CheckpointFormatError(
            f"the checkpoint has no values for {abridged(plan.missing)} of {type(plan.twin).__name__}; "
            f"{other}load_weights(missing='initialise') fills them with the model's own initialisation",
            missing=plan.missing,
        )


def _settle_unexpected(plan: LoadPlan, left_over: Mapping[str, str], policy: str) -> None:
    """Note which keys the model has no place for; raise if that is an error."""
    _, allowed = ignored_on_load(plan.twin)
    plan.unexpected = sorted(name for name in left_over if not matches_any(name, allowed))
    if plan.unexpected and policy == "error":
        raise CheckpointFormatError(
            f"{type(plan.twin).__name__} has no place for {abridged(plan.unexpected)} of the checkpoint; "
            "load_weights(unexpected='ignore') leaves them unread",
            unexpected=plan.unexpected,
        )


# Packed weights of a checkpoint whose config does not say that it is quantised: never taken as values.

_PACKED = (torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether weights of that dtype need scales that are stored beside them."""
    return dtype.itemsize == 1 or not dtype.is_floating_point


def refuse_packed(missing: list[str], left_over: Mapping[str, torch.dtype]) -> None:
    """Refuse a checkpoint whose missing values are stored packed, under names of a quantised format.

    Args:
        missing: Names of the model's tensors that the checkpoint lacks.
        left_over: Dtypes of the checkpoint's tensors that the model lacks, by name.

    Raises:
        CheckpointFormatError: If the module of a missing value, or one within it, has packed values instead.
    """
    packed = sorted(name for name, dtype in left_over.items() if dtype in _PACKED)
    for name in missing:
        module = name.rpartition(".")[0]
        beside = [key for key in packed if module and key.startswith(f"{module}.")]
        if beside:
            raise CheckpointFormatError(
                f"the checkpoint has no values for {name!r}, but packed ones ({abridged(beside)}): it is "
                f"quantised, and its config does not say how: {IN_16_BITS}"
            )
