"""Data sets, loaders, chat templates and tokenizers."""

import functools
import re
from typing import Any

import torch


def is_hub_dataset(rows: Any) -> bool:
    """Whether ``rows`` is a ``datasets.Dataset``, by its ``_fingerprint``: datasets may not be installed."""
    return hasattr(rows, "_fingerprint") and hasattr(rows, "column_names") and hasattr(rows, "__len__")


def dataset_fingerprint(rows: Any) -> str | None:
    """The fingerprint of a ``datasets.Dataset``; None for other rows.

    ``datasets`` computes it from the data set's files and all that was done to it, and keeps it in
    ``_fingerprint`` alone.
    """
    return str(rows._fingerprint) if is_hub_dataset(rows) else None


def shares_of_stream(rows: Any) -> int:
    """Number of shares that a stream of ``datasets`` was split into, if ``rows`` is one of them; else 1.

    ``datasets.distributed.split_dataset_by_node`` marks a share by the private ``_distributed`` alone.
    """
    return int(getattr(getattr(rows, "_distributed", None), "world_size", None) or 1)


def end_persistent_workers(loader: "torch.utils.data.DataLoader[Any]") -> None:
    """End the workers that a loader has kept; the next ones get its data set as it is now.

    Persistent workers copied the data set when they started, and do not see a later ``set_epoch``. A loader
    keeps them with its iterator, in the private ``_iterator``.
    """
    if loader.persistent_workers:
        loader._iterator = None


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    *,
    variables: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Render one conversation in transformers' sandbox.

    ``apply_chat_template`` calls ``render_jinja_template``; only the latter returns the character spans of
    ``{% generation %}`` blocks.

    Returns:
        (text, character spans of the generation blocks; empty for a template without them).
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    # A template without the tag is not asked for spans, since transformers would log a warning.
    tagged = _has_generation_tag(template)
    render: Any = render_jinja_template  # annotated as returning a str; returns a pair, at least up to 5.23
    texts, spans = render(
        [messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=tagged,
        continue_final_message=False,  # so that no row can set it
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    return texts[0], [(int(start), int(end)) for start, end in (spans[0] if tagged else ())]


@functools.lru_cache(maxsize=64)
def _has_generation_tag(template: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
