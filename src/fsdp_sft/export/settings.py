"""The files of an export beside its weights: configuration, generation config, tokenizer and card."""

import copy
import json
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from fsdp_sft._compat.models import tied_names
from fsdp_sft._model.published import ModelTensors
from fsdp_sft._model.twin import MTP_LAYERS
from fsdp_sft._model.view import tokenizer_of
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._quantised.settings import CONFIG, read_settings
from fsdp_sft._tensors.disk import write_bytes
from fsdp_sft._tensors.stored import Stored
from fsdp_sft.collate.template import ChatTemplate, templates_used
from fsdp_sft.errors import ChatTemplateError, CheckpointFormatError
from fsdp_sft.sac.attach import configs_without_caches
from fsdp_sft.weights.resolve import PROCESSOR_FILES, open_checkpoint, resolved_inside

# What an exported model needs in order to chat as it was trained: chat template and end of an answer.


def write_chat(folder: Path, model: Any, config: Any, tokenizer: Any, chat_template: str | None) -> None:
    """Save a tokenizer or processor with the template that was trained, and a generation config that fits.

    The caller's objects stay as they are.

    Args:
        folder: Folder of the export.
        model: A transformers model.
        config: Its config.
        tokenizer: Tokenizer or processor; None saves the template alone.
        chat_template: Template with which rows were encoded, or the name of one of the tokenizer's; None is
            the tokenizer's own.
    """
    own = getattr(tokenizer, "chat_template", None) or getattr(tokenizer_of(tokenizer), "chat_template", None)
    named = own if isinstance(own, dict) else {"default": own}
    template: str | None = named.get(chat_template or "default", chat_template)
    if tokenizer is not None:
        used = templates_used(tokenizer_of(tokenizer))
        if used and chat_template is None and template not in used:
            warn_caller(
                "rows were encoded with another chat template than the tokenizer has, and the export gets "
                "the tokenizer's: pass chat_template= as the collator got it, so that the export is asked as "
                "it was trained"
            )
        tokenizer.save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text()) if path.exists() else {}
        # A name that transformers 4 and mlx-lm know too: both refuse a TokenizersBackend.
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            if isinstance(settings.get("extra_special_tokens"), list):
                settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
            path.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    if template is not None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        write_bytes(folder / "chat_template.jinja", template.encode())
    write_generation_config(folder, model, config, end_of_turn(tokenizer, template))


def end_of_turn(tokenizer: Any, template: str | None) -> int | None:
    """Id of the token that ends an answer; None if there is no template, or it ends answers with no token."""
    own = tokenizer_of(tokenizer)
    if template is None or own is None or not hasattr(own, "get_chat_template"):
        return None
    try:
        facts = ChatTemplate(own, template).facts()
    except (ChatTemplateError, ValueError) as error:
        warn_caller(f"the end of an answer was not added to generation_config.eos_token_id: {error}")
        return None
    ends = facts.end_of_turn is not None and facts.stop_is_token  # the collator warns of a text
    return int(own.convert_tokens_to_ids(facts.end_of_turn)) if ends else None


# What an export copies from its base checkpoint: custom code and processor files.

_OF_A_CHECKPOINT = "transformers_modules"  # the package in which transformers imports code of checkpoints


def carry_code(cls: type, config: Any, folder: Path) -> None:
    """Copy the checkpoint's custom code, and remove from ``auto_map`` the entries whose code is missing.

    Such an entry would make loading with ``trust_remote_code=True`` fail although transformers has the class.

    Args:
        cls: Class of the model.
        config: Config of the export, which is changed.
        folder: Folder of the export.
    """
    from transformers.dynamic_module_utils import custom_object_save

    for own in (cls, type(config)):
        if own.__module__.split(".")[0] == _OF_A_CHECKPOINT:
            custom_object_save(own, folder)
    if getattr(config, "auto_map", None):
        config.auto_map = {
            name: there
            for name, entry in config.auto_map.items()
            if (there := _reference(entry, folder)) is not None
        }


def _reference(entry: Any, folder: Path) -> Any:
    """An entry of an ``auto_map``, pointed to the copied code if there is any; None if code is missing."""
    if isinstance(entry, (list, tuple)):
        parts = [part and _reference(part, folder) for part in entry]
        return parts if any(parts) else None
    repository, _, within = str(entry).rpartition("--")
    if (folder / f"{within.partition('.')[0]}.py").is_file():
        return within
    return entry if repository else None  # in a repository on the Hub


# The model card of an export, which the Hub shows: where the model comes from.


def model_card(config: Any, title: str, num_parameters: int) -> str:
    """A model card in Markdown, with the Hub's metadata at its head.

    Args:
        config: Config of the export.
        title: Title of the card.
        num_parameters: Number of the model's parameters.
    """
    from fsdp_sft import __version__

    base = config.name_or_path or ""
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", base) and not Path(base).exists()  # of the Hub
    origin = f" from [{base}](https://huggingface.co/{base})" if is_id else ""
    base_line = f"base_model: {base}\n" if is_id else ""
    return f"""---
library_name: transformers
{base_line}tags:
- sft
---

# {title}

`{config.architectures[0]}` of {num_parameters:,} parameters in {str(config.dtype).removeprefix("torch.")},
fine-tuned{origin} and exported with fsdp_sft {__version__}.
"""


def export_config(model: Any, twin: Any, content: ModelTensors, dtype: torch.dtype | None) -> Any:
    """The config to export: a copy of the model's, with ``use_cache`` restored, tied only if the weights are.

    Args:
        model: A transformers model.
        twin: A model of its class and config.
        content: The model's tensors.
        dtype: Dtype of the export; None is the model's.
    """
    copies: dict[int, Any] = {}
    config = copy.deepcopy(model.config, copies)
    for changed in configs_without_caches(model):
        if id(changed) in copies:
            copies[id(changed)].use_cache = True
    names = content.names
    # One of two was adapted, or they were loaded so.
    if any(names[a] != names[b] for a, b in tied_names(twin).items() if a in names and b in names):
        for part in {id(c): c for c in (config, config.get_text_config())}.values():
            part.tie_word_embeddings = False
    vars(config).pop("quantization_config", None)  # of a model that transformers read from a GGUF
    config.dtype = dtype or model.dtype
    config.architectures = [type(twin).__name__]
    return config


# Layers that predict further tokens (MTP), with which servers decode speculatively. Models are trained
# without them, so an export takes them from its base.

_OF_MTP = re.compile(r"(^|[._])(mtp|nextn)([._]|$)")
_LAYER = re.compile(r"(.*?\blayers\.)(\d+)\.")


def further_predictions(config: Any, written: Collection[str]) -> dict[str, Stored]:
    """The tensors in the base's files that predict further tokens; none if the model has its own.

    They are named so (``mtp.``), or are of a layer behind the model's last one. If there are none, or they do
    not fit the model, the config says 0 layers: a server that finds another number looks for them.

    Args:
        config: Config of the export, which is changed.
        written: Names of the model's tensors in the files.
    """
    text, (base, said) = config.get_text_config(), _base_of(config)
    said, depth = said.get("text_config") or said, getattr(text, "num_hidden_layers", 0)
    layers = [(layer[1], int(layer[2])) for layer in map(_LAYER.match, written) if layer]
    # Lists that end where the text model does: those of towers may be deeper.
    lists = {name for name, number in layers if number == depth - 1} - {
        name for name, number in layers if number >= depth
    }

    def is_one(key: str) -> bool:
        layer = _LAYER.match(key)
        is_behind = layer is not None and layer[1] in lists and int(layer[2]) >= depth
        return is_behind or _OF_MTP.search(key) is not None

    if any(map(is_one, written)):
        return {}
    found, why = dict[str, Stored](), "the files of its base are not at hand"
    if base is not None:
        with suppress(CheckpointFormatError, OSError):  # no reason to end a training without its export
            found = {key: tensor for key, tensor in open_checkpoint(base).items() if is_one(key)}
            why = ""
    fields = ["num_hidden_layers", "hidden_size"]
    if any(tensor.entry.shape[:1] == (said.get("vocab_size"),) for tensor in found.values()):
        fields.append("vocab_size")  # an embedding of their own
    changed = [field for field in fields if field in said and said[field] != getattr(text, field, None)]
    if found and changed:
        found, why = {}, f"the model has another {' and '.join(changed)} than its base"
    places = [(part, field) for part in (text, config) for field in MTP_LAYERS if getattr(part, field, 0)]
    if why and config.name_or_path and places:
        warn_caller(f"the layers that predict further tokens (MTP) are left out of the export: {why}")
    for part, field in places if not found else ():
        setattr(part, field, 0)
    return found


# What else an export copies from its base.


def carry_processor(config: Any, folder: Path) -> None:
    """Copy the base's processor files, unless the export has them already.

    Args:
        config: Config of the export.
        folder: Folder of the export.
    """
    base, said = _base_of(config)
    # A text model taken out of a multimodal checkpoint needs no processor.
    if base is None or said.get("model_type") != config.model_type:
        return
    for file in PROCESSOR_FILES:
        if (base / file).is_file() and not (folder / file).exists():
            try:
                shutil.copyfile(resolved_inside(base, file), folder / file)
            except CheckpointFormatError as error:  # no reason to end a training without its export
                warn_caller(f"{error}; it is not copied into the export")


def _base_of(config: Any) -> tuple[Path | None, dict[str, Any]]:
    """The folder that a model was loaded from, or its snapshot in the Hub's cache, and the config there.

    Without a config that can be read there is none, which is no reason to end a training without its export.
    """
    name = str(getattr(config, "name_or_path", "") or "")
    with suppress(CheckpointFormatError, OSError, ValueError):  # or it is no name of a repository
        found = (
            Path(name, CONFIG)
            if Path(name).is_dir()
            else try_to_load_from_cache(name, CONFIG, revision=getattr(config, "_commit_hash", None))
        )
        if name and isinstance(found, (str, Path)):
            return Path(found).parent, read_settings(Path(found))
    return None, {}


def write_settings(
    model: Any,
    cls: type,
    config: Any,
    folder: Path,
    title: str,
    num_parameters: int,
    tokenizer: Any,
    chat_template: str | None,
) -> None:
    """Write configuration, code, generation config, tokenizer, processor and card into ``folder``.

    Args:
        model: A transformers model.
        cls: Its class.
        config: Config to write, from ``export_config``.
        folder: Folder of the export.
        title: Title of the card.
        num_parameters: Number of the model's parameters, for the card.
        tokenizer: See ``write_chat``.
        chat_template: See ``write_chat``.
    """
    carry_code(cls, config, folder)
    config.save_pretrained(folder)
    _say_to_others(config, folder / "config.json")
    write_chat(folder, model, config, tokenizer, chat_template)
    (folder / "README.md").write_text(model_card(config, title, num_parameters), encoding="utf-8")
    carry_processor(config, folder)


def _say_to_others(config: Any, path: Path) -> None:
    """Write a config in the fields of transformers 4 too, as other programs read no others.

    Of ``rope_parameters`` alone transformers 4.57 reads nothing, and mlx-lm 0.32 nothing for most families:
    both take a base of 10000 without a word. A field of which this transformers would make another config is
    left out.
    """
    # Read from the file: infinities stand there as {"__float__": ...}, which from_dict does not read.
    written, same = json.loads(path.read_text()), type(config).from_json_file(path).to_dict()
    for part in (written, written.get("text_config") or {}):
        by_kind = part.get("rope_parameters") or {}
        rope = by_kind.get("full_attention", by_kind) or {}  # None where those layers have no positions
        of_neox = part.get("model_type") == "gpt_neox"
        is_scaled = rope.get("rope_type", "default") != "default" and not of_neox
        of_scaling = rope.keys() - {"rope_theta", "partial_rotary_factor"}
        fields = {
            "rotary_emb_base" if of_neox else "rope_theta": rope.get("rope_theta"),
            "rotary_pct" if of_neox else "partial_rotary_factor": rope.get("partial_rotary_factor"),
            "rope_scaling": {name: rope[name] for name in of_scaling} if is_scaled else None,
            "rope_local_base_freq": (by_kind.get("sliding_attention") or {}).get("rope_theta"),
            "num_experts": part.get("num_local_experts"),
        }
        for name in [name for name in fields if name not in part and fields[name] is not None]:
            part[name] = fields[name]
            _write_json(path, written)
            with suppress(KeyError, TypeError, ValueError):  # its own check of rotary embeddings
                if type(config).from_json_file(path).to_dict() == same:
                    continue
            del part[name]
    _write_json(path, written)


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def write_generation_config(folder: Path, model: Any, config: Any, stop: int | None) -> None:
    """Write the generation config of a model that generates, with ``stop`` among the tokens that end it.

    Without a generation config one is made for ``stop``; if there is no ``stop`` either, nothing is written.
    """
    if not getattr(model, "can_generate", bool)():
        return
    from transformers import GenerationConfig

    generation = copy.deepcopy(model.generation_config)
    if stop is not None:
        generation = generation or GenerationConfig.from_model_config(config)
        known = generation.eos_token_id  # one id, a list of ids, or None
        ids = [] if known is None else list(known) if isinstance(known, (list, tuple)) else [known]
        generation.eos_token_id = known if stop in ids else [stop, *ids]
    if generation is not None:
        # Without the checks of save_pretrained: some on the Hub contradict themselves (a temperature without
        # sampling), which transformers loads with a warning, and which must not fail the export.
        path = folder / "generation_config.json"
        generation.to_json_file(path, use_diff=True, keys_to_pop=["compile_config"])
