"""What an exported model needs in order to chat as it was trained: chat template and end of an answer."""

import copy
import json
from pathlib import Path
from typing import Any

from fsdp_sft._model.wrappers import tokenizer_of
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._tensors.disk import write_bytes
from fsdp_sft.collate.template import ChatTemplate, templates_used
from fsdp_sft.errors import ChatTemplateError


def write_tokenizer(folder: Path, tokenizer: Any, chat_template: str | None) -> str | None:
    """Save a tokenizer or processor with the template that was trained. The caller's object stays as it is.

    Args:
        folder: Folder of the export.
        tokenizer: Tokenizer or processor; None saves the template alone.
        chat_template: Template with which rows were encoded, or the name of one of the tokenizer's; None is
            the tokenizer's own.

    Returns:
        The template that the folder has afterwards; None if it has none.
    """
    if not hasattr(tokenizer, "chat_template"):  # None, or a tokenizer without templates
        if tokenizer is not None:
            _save(tokenizer, folder)
        if chat_template is not None:
            (folder / "chat_template.jinja").unlink(missing_ok=True)
            write_bytes(folder / "chat_template.jinja", chat_template.encode())
        return chat_template
    exported, template = tokenizer, _text(tokenizer, chat_template)
    if chat_template is not None:
        exported = copy.copy(tokenizer)
        named = tokenizer.chat_template
        exported.chat_template = {**named, "default": template} if isinstance(named, dict) else template
    elif (used := templates_used(tokenizer_of(tokenizer))) and template not in used:
        warn_caller(
            "rows were encoded with another chat template than the tokenizer has, and the export gets the "
            "tokenizer's: pass chat_template= as the collator got it, so that the export is asked as it was "
            "trained"
        )
    _save(exported, folder)
    return template


def _save(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer by names that transformers 4 and mlx-lm know too: both refuse a TokenizersBackend."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        path.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


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
    if facts.end_of_turn is None:
        return None
    if not facts.stop_is_token:
        warn_caller(
            f"answers end with {facts.end_of_turn!r}, which is no token of the tokenizer, so generation "
            "cannot stop on it by an id: give generate() stop_strings=, or train with the token added"
        )
        return None
    return int(own.convert_tokens_to_ids(facts.end_of_turn))


def with_stop(known: Any, stop: int) -> Any:
    """The ids on which generation stops, with one more in front unless it is among them.

    Args:
        known: Ids so far: one id, a list of ids, or None.
        stop: Id to add.
    """
    ids = [] if known is None else list(known) if isinstance(known, (list, tuple)) else [known]
    return known if stop in ids else [stop, *ids]


def _text(tokenizer: Any, chat_template: str | None) -> str | None:
    """Text of a template given as text, by name, or as None (the default), as in transformers."""
    named = tokenizer.chat_template or getattr(tokenizer_of(tokenizer), "chat_template", None)
    if isinstance(named, dict):
        return named.get(chat_template or "default", chat_template)
    return chat_template or named
