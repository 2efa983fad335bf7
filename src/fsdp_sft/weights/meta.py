"""A model on the meta device, built as ``from_pretrained`` builds it, ready to be sharded."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._compat import (
    build_like_from_pretrained,
    drop_tie,
    initialise_computed,
    tie_by_names,
    tied_names,
)
from fsdp_sft._model import meta_twin
from fsdp_sft.errors import CheckpointFormatError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fsdp_sft.weights.resolve import Checkpoint

_PROBES = 64
_PROBE_BYTES = 1 << 14


def build_meta_model(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    **config_overrides: Any,
) -> "PreTrainedModel":
    """Build the model that a checkpoint's config names, with no memory behind its tensors.

    The class is ``config.architectures[0]``. Weights are tied as the config says, unless the folder's
    checkpoint holds two different tensors for the two names: then they stay apart, as ``from_pretrained``
    leaves them. Parameters that the class keeps in float32 are float32 under a 16-bit ``dtype``.

    Args:
        name_or_path: A folder with a ``config.json``, or a Hub id.
        revision: Branch, tag or commit of a Hub id.
        dtype: Of the parameters, and what computed buffers are derived in.
        attn_implementation: Such as ``"sdpa"`` or ``"flash_attention_2"``; None is transformers' choice.
        trust_remote_code: Whether a class that the checkpoint brings along may be imported and run.
        allow_pickle: See ``load_weights``; here, whether a ``pytorch_model.bin`` is asked about tied weights.
        **config_overrides: Fields of the config to replace.

    Returns:
        The model in ``train()`` mode, on the meta device; every floating parameter requires a gradient.

    Raises:
        CheckpointFormatError: If the config names no class that can be built, or is of a quantised model.
        TypeError: For a field that the config does not have.
    """
    cls, config = _class_and_config(
        str(name_or_path), revision, attn_implementation, trust_remote_code, config_overrides
    )
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointFormatError(
            f"{name_or_path} is quantised; load it with transformers, dequantize() it, and save that"
        )
    config.name_or_path = str(name_or_path)
    model = build_like_from_pretrained(cls, config, dtype)
    _set_requires_grad(model)
    _take_generation_config(model, Path(name_or_path))
    _tie(model, Path(name_or_path), allow_pickle)
    return model.train()  # type: ignore[no-any-return]


def _set_requires_grad(model: nn.Module) -> None:
    """As ``from_pretrained`` leaves it: every floating parameter but those that initialisation freezes."""
    frozen = not all(p.requires_grad for p in model.parameters() if p.is_floating_point())
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    if frozen:
        twin = meta_twin(model)
        for parameter in twin.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        initialise_computed(twin, set())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(twin.get_parameter(name).requires_grad)


def _class_and_config(
    name: str, revision: str | None, attention: str | None, remote: bool, overrides: dict[str, Any]
) -> tuple[Any, Any]:
    import transformers

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": remote}
    config = _auto_config(name, options)
    architecture = next(iter(config.architectures or ()), None)
    if architecture is None:
        raise CheckpointFormatError(f"the config of {name} names no architecture; add 'architectures' to it")
    cls = _remote_class(config, architecture, name, revision) if remote else None
    cls = cls or getattr(transformers, architecture, None)
    if cls is None or not hasattr(cls, "from_pretrained"):
        raise CheckpointFormatError(
            f"transformers {transformers.__version__} has no {architecture}, which the config of {name} "
            "names; update transformers, or pass trust_remote_code=True if the checkpoint brings the class"
        )
    if attention is not None:
        options["attn_implementation"] = attention
    if cls.config_class is not None:  # a text model reads its own part of a multimodal config
        config, unused = cls.config_class.from_pretrained(
            name, return_unused_kwargs=True, **options, **overrides
        )
        unknown = sorted(set(unused) & set(overrides))
        if unknown:
            raise TypeError(f"{cls.config_class.__name__} has no field {', '.join(unknown)}")
    return cls, config


def _auto_config(name: str, options: dict[str, Any]) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(name, **options)
    except ValueError as error:
        if options["trust_remote_code"] or "trust_remote_code" not in str(error):
            raise
        raise CheckpointFormatError(
            f"{name} brings code of its own, which has not been run; read it, and if you trust it pass "
            "trust_remote_code=True"
        ) from None


def _remote_class(config: Any, architecture: str, name: str, revision: str | None) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for reference in (getattr(config, "auto_map", None) or {}).values():
        if isinstance(reference, str) and reference.rpartition(".")[2] == architecture:
            return get_class_from_dynamic_module(reference, name, revision=revision)
    return None


def _take_generation_config(model: Any, folder: Path) -> None:
    if (folder / "generation_config.json").is_file() and getattr(
        model, "generation_config", None
    ) is not None:
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)


def _tie(model: nn.Module, folder: Path, allow_pickle: bool) -> None:
    ties = tied_names(model)
    if ties and folder.is_dir():
        from fsdp_sft.weights.resolve import open_checkpoint

        try:
            checkpoint = open_checkpoint(folder, allow_pickle=allow_pickle)
        except CheckpointFormatError:
            checkpoint = None  # loading will say what is wrong; the architecture can be built without weights
        for target, source in ties.items() if checkpoint is not None else ():
            if checkpoint is not None and _differ(checkpoint, target, source):
                drop_tie(model, target)
    if ties:
        tie_by_names(model)


def _differ(checkpoint: "Checkpoint", target: str, source: str) -> bool:
    """Whether a checkpoint holds two tensors that differ, by samples; loading compares every element."""
    from fsdp_sft._safetensors import open_file, read_at

    found = [checkpoint.sources.get(name) for name in (target, source)]
    if found[0] is None or found[1] is None:
        return False
    first, second = found[0], found[1]
    if (first.entry.dtype, first.entry.shape) != (second.entry.dtype, second.entry.shape):
        return True
    total = first.entry.num_bytes
    size = min(_PROBE_BYTES, total)
    descriptors = [open_file(checkpoint.files[found.file]) for found in (first, second)]
    try:
        for probe in range(_PROBES):
            at = (total - size) * probe // max(_PROBES - 1, 1)
            pair = [bytearray(size), bytearray(size)]
            for fd, entry, buffer in zip(descriptors, (first.entry, second.entry), pair, strict=True):
                read_at(fd, entry.start + at, memoryview(buffer))
            if pair[0] != pair[1]:
                return True
    finally:
        for fd in descriptors:
            os.close(fd)
    return False


def matches_any(name: str, patterns: list[str]) -> bool:
    """Whether one of the regular expressions is found in a name."""
    return any(re.search(pattern, name) for pattern in patterns)
