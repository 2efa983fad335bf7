"""Building a checkpoint's model on the meta device as ``from_pretrained`` builds it, ready to be sharded."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._compat.attention import ask_for_attention
from fsdp_sft._compat.conversions import match_checkpoint_keys, weight_conversions
from fsdp_sft._compat.models import (
    build_like_from_pretrained,
    initialise_computed,
    tied_names,
)
from fsdp_sft._model.configs import auto_config, check_settings, read_by_transformers, refuse_kernels
from fsdp_sft._model.twin import keep_config, meta_twin
from fsdp_sft._model.view import record_of
from fsdp_sft._process.devices import check_dtypes
from fsdp_sft._quantised.find import check
from fsdp_sft._quantised.settings import Settings, settings_of, without_settings
from fsdp_sft._ranks.agree import tell
from fsdp_sft._tensors.boxes import Box
from fsdp_sft._tensors.reader import do_reads
from fsdp_sft._tensors.safetensors import bytes_of
from fsdp_sft._tensors.stored import Stored
from fsdp_sft.errors import CheckpointFormatError, UnsupportedModelError
from fsdp_sft.weights.resolve import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_logger = logging.getLogger(__name__)
_PROBES = 64  # rows in which tied weights are compared before loading
OLD_ROWS = "_fsdp_sft_old_rows"  # attribute: rows of the checkpoint's vocabulary, if the model has more, or 0


def build_meta_model(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    new_vocab_size: int | None = None,
    **config_overrides: Any,
) -> "PreTrainedModel":
    """Build the model that a checkpoint's config names, with no memory behind its tensors.

    The class is ``config.architectures[0]``. Another class of the same kind of model can be asked for with
    ``architectures=["LlamaForSequenceClassification"]``. Weights are tied as the config says, unless the
    folder's checkpoint holds two tensors under the two names that differ in one of 64 rows: then they stay
    apart, as ``from_pretrained`` leaves them. Parameters that the class always keeps in float32 are float32
    even if ``dtype`` is a 16-bit one.

    Args:
        name_or_path: A folder with a ``config.json``, or a Hub id.
        revision: Branch, tag or commit of a Hub id.
        dtype: Dtype of the parameters, in which buffers that are computed from the config are computed too.
        attn_implementation: Attention implementation, such as ``"sdpa"`` or ``"flash_attention_2"``; None is
            transformers' choice.
        trust_remote_code: Whether a class that the checkpoint brings along may be imported and run.
        new_vocab_size: Number of tokens for which the embedding and the head are to have rows. Rows are added
            and never taken away: None, and a number for which the checkpoint has rows already, keep the
            checkpoint's, spare rows included. ``load_weights`` sets each new row to the mean of the old ones,
            taken in float64 and the same on all ranks; a class in which more than rows depends on the number
            of tokens is refused there, and one whose embedding or head keeps its rows at once.
        **config_overrides: Fields of the config to replace. With ``model_type="deepseek_v3"`` a config of a
            type that transformers does not know is read as one of that type.

    Returns:
        The model in ``train()`` mode, on the meta device. Every floating-point parameter requires a gradient,
        except those that the class freezes when it initialises weights.

    Raises:
        CheckpointFormatError: If the config names no class that can be built, or a way to quantise weights
            that is not read.
        TypeError: If the config does not have a field of ``config_overrides``.
        UnsupportedModelError: If embedding and head do not follow the size of the vocabulary in the config,
            for ``new_vocab_size`` tokens.

    Example:
        >>> model = fs.build_meta_model(path, attention_dropout=0.1)
        >>> next(model.parameters()).device, model.config.attention_dropout
        (device(type='meta'), 0.1)
        >>> shards = fs.shard_model(model, mesh=mesh)
        >>> report = fs.load_weights(model, path)  # only now do the shards have memory
    """
    return build(
        Checkpoint(os.path.expanduser(name_or_path)),
        revision=revision,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        new_vocab_size=new_vocab_size,
        **config_overrides,
    )


def build(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None,
    trust_remote_code: bool,
    new_vocab_size: int | None,
    revision: str | None = None,
    **config_overrides: Any,
) -> "PreTrainedModel":
    """The model of a checkpoint that may be opened already; see ``build_meta_model``."""
    check_dtypes(dtype=dtype)
    name = checkpoint.name
    cls, config, quantised = _class_and_config(
        name, revision, attn_implementation, trust_remote_code, config_overrides
    )
    # Exports look there for what is not trained, wherever the process has gone since.
    config.name_or_path = os.path.abspath(name) if os.path.isdir(name) else name
    old_rows = 0 if new_vocab_size is None else _add_tokens(config, new_vocab_size)
    with read_by_transformers(name, "config"):
        model = build_like_from_pretrained(cls, config, dtype)
        setattr(model, OLD_ROWS, old_rows)
        _set_requires_grad(model)
        if Path(name, "generation_config.json").is_file() and hasattr(model, "generation_config"):
            from transformers import GenerationConfig

            model.generation_config = GenerationConfig.from_pretrained(name)
    for what in ("input", "output") if old_rows else ():
        weight = getattr(getattr(model, f"get_{what}_embeddings")(), "weight", None)
        if weight is not None and weight.shape[0] != new_vocab_size:
            raise UnsupportedModelError(
                f"new_vocab_size cannot add tokens to {cls.__name__}: its {what} embeddings keep "
                f"{weight.shape[0]} rows; resize it with transformers, save it, and load that"
            )
    _tie(model, checkpoint)
    model.name_or_path = config.name_or_path
    if quantised is not None:
        record_of(model).keep(quantised)
    keep_config(model)
    return model.train()  # type: ignore[no-any-return]


def _add_tokens(config: Any, new: int) -> int:
    """Write a larger vocabulary size into a config; return the old one, or 0 if it is large enough.

    Rows are never taken away: many checkpoints have spare ones.
    """
    text = config.get_text_config()
    old: int = text.vocab_size
    if new <= old:
        return 0
    for part in (text, config):
        if getattr(part, "vocab_size", None) == old:
            part.vocab_size = new
    return old


def _set_requires_grad(model: nn.Module) -> None:
    """Let every floating-point parameter require a gradient, except those that initialisation freezes.

    That is how ``from_pretrained`` leaves a model.
    """
    frozen = not all(p.requires_grad for p in model.parameters() if p.is_floating_point())
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    if frozen:
        # Some are frozen, but not necessarily by initialisation: a second model, in which all are thawed
        # before it is initialised, shows which ones are.
        twin = meta_twin(model)
        for parameter in twin.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        initialise_computed(twin, set())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(twin.get_parameter(name).requires_grad)


def _class_and_config(
    name: str, revision: str | None, attention: str | None, remote: bool, overrides: dict[str, Any]
) -> tuple[Any, Any, Settings | None]:
    """Class and config of the model, with the overrides applied, and how its checkpoint is quantised."""
    import transformers

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": remote}
    check_settings(Path(name))
    with read_by_transformers(name, "config") if Path(name).is_dir() else nullcontext():
        config = auto_config(name, kind=overrides.get("model_type"), **options)
    quantised = settings_of(name, config)
    if quantised is not None:
        check(quantised)
    architecture = _with_head(_architecture(name, config, overrides), config, overrides)
    cls: Any = _remote_class(config, architecture, name, revision) if remote else None
    shared = _shared_class(config)
    is_asked_for = "architectures" in overrides or not architecture.endswith(
        ("ForCausalLM", "ForConditionalGeneration")
    )
    cls = cls or getattr(transformers, architecture, None if is_asked_for else shared)
    if cls is None or not hasattr(cls, "from_pretrained"):
        raise CheckpointFormatError(
            f"transformers {transformers.__version__} has no {architecture}, which the config of {name} "
            "names; update transformers, or pass trust_remote_code=True if the checkpoint brings the class"
        )
    is_shared = shared is not None and cls.config_class is shared.config_class
    config_class = type(config) if is_shared else cls.config_class
    if not is_shared and ("architectures" in overrides or "model_type" in overrides):
        _check_same_kind(name, cls, config)
    if attention is not None:
        options["attn_implementation"] = attention
    if config_class is not None:  # the text model of a multimodal one reads its own part of the config
        with read_by_transformers(name, "config"):
            config, unused = config_class.from_pretrained(
                name, return_unused_kwargs=True, **options, **overrides
            )
        unknown = sorted(set(unused) & set(overrides))
        if unknown:
            raise TypeError(f"{config_class.__name__} has no field {', '.join(unknown)}")
    if attention is not None:
        ask_for_attention(config, attention)
    elif not remote:
        refuse_kernels(name, config)
    without_settings(config)  # the model's weights will not be quantised
    return cls, config, quantised


def _shared_class(config: Any) -> Any:
    """The class by which transformers computes a type of model that has none, as Llama's for InternLM3.

    Checkpoints of such types name the class that their own code had.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    names = {**auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    cls = getattr(transformers, str(names.get(config.model_type)), None)
    kind = getattr(getattr(cls, "config_class", None), "model_type", config.model_type)
    return None if kind in set(_model_types(config)) else cls


def _architecture(name: str, config: Any, overrides: dict[str, Any]) -> str:
    """Name of the class that the overrides ask for, else of the one that the checkpoint names."""
    wanted = overrides.get("architectures", config.architectures)
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if not wanted or not isinstance(wanted, (list, tuple)):
        raise CheckpointFormatError(
            f"the config of {name} names no architecture; pass architectures=['...ForCausalLM']"
        )
    if "architectures" in overrides:
        overrides["architectures"] = list(wanted)
    return str(wanted[0])


def _with_head(architecture: str, config: Any, overrides: dict[str, Any]) -> str:
    """The class with a head for a checkpoint that names the bare one of a causal LM, as BLOOM's does.

    The bare class of a model for masked words stays, and so does one that the caller asks for.
    """
    from transformers.models.auto import modeling_auto as auto

    kind, bare = config.model_type, auto.MODEL_MAPPING_NAMES.get(config.model_type)
    is_bare = architecture == bare and architecture.endswith("Model")
    if "architectures" in overrides or not is_bare or kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return architecture
    with_head = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, architecture)
    if with_head != architecture:
        tell(_logger, "the config names %s, which has no head: %s is built", architecture, with_head)
    return str(with_head)


def _check_same_kind(name: str, cls: Any, config: Any) -> None:
    """Refuse a class for another type of model than the config, or any part of it, describes."""
    own = getattr(cls.config_class, "model_type", "")
    if own and own not in set(_model_types(config)):
        raise CheckpointFormatError(
            f"{cls.__name__} is a class for models of type {own!r}, and {name} holds one of type "
            f"{config.model_type!r}: name a class of that type in architectures"
        )


def _model_types(config: Any) -> Iterator[str]:
    """The model types of a config and of the configs inside it."""
    yield str(getattr(config, "model_type", ""))
    for name in getattr(config, "sub_configs", ()):
        yield from _model_types(getattr(config, name, None))


def _remote_class(config: Any, architecture: str, name: str, revision: str | None) -> Any:
    """The class of that name from the checkpoint's own code; None if the checkpoint brings none."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for reference in (getattr(config, "auto_map", None) or {}).values():
        if isinstance(reference, str) and reference.rpartition(".")[2] == architecture:
            return get_class_from_dynamic_module(reference, name, revision=revision)
    return None


def _tie(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Tie weights as the config says, except where the checkpoint has two different tensors."""
    ties = tied_names(model)
    if not ties:
        return
    stored: Mapping[str, Stored] = {}
    # If it cannot be opened, loading will say why: the architecture can be built without weights.
    with suppress(CheckpointFormatError):
        stored = checkpoint.stored
    matched, _ = match_checkpoint_keys(model, list(stored), weight_conversions(model))
    keys = {name: next(iter(s.values()))[0] for name, (c, s) in matched.items() if c is None}
    for target, source in ties.items():
        if target in keys and source in keys and _differ(stored, keys[target], keys[source]):
            # transformers drops such a tie too. Without the argument below it would read the config again.
            model.all_tied_weights_keys.pop(target, None)  # type: ignore[operator,union-attr]
    model.tie_weights(recompute_mapping=False)  # type: ignore[operator]


def _differ(stored: Mapping[str, Stored], *names: str) -> bool:
    """Whether two tensors of a checkpoint differ, by some rows spread over both.

    Loading the weights compares every element.
    """
    first, second = (stored[name] for name in names)
    if (first.entry.dtype, first.entry.shape) != (second.entry.dtype, second.entry.shape):
        return True
    shape = first.entry.shape
    rows = sorted({(shape[0] - 1) * probe // max(_PROBES - 1, 1) for probe in range(_PROBES)})
    boxes = [Box((row, *(0 for _ in shape[1:])), (1, *shape[1:])) for row in rows]
    found = [torch.empty(len(rows), *shape[1:], dtype=first.entry.dtype) for _ in names]
    do_reads(
        read
        for name, values in zip(names, found, strict=True)
        for index, box in enumerate(boxes)
        for read in stored[name].reads(stored[name].piece(name), box, values[index : index + 1])
    )
    return bytes_of(found[0]) != bytes_of(found[1])
