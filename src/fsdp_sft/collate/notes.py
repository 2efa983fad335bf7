"""Notes on unusual rows that are kept, by name, and the warning of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from torch.utils.data import get_worker_info

from fsdp_sft._process.callers import warn_caller
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft.collate.layout import occurs
from fsdp_sft.collate.options import EncodeOptions
from fsdp_sft.collate.rows import REASONING_KEYS, Conversation
from fsdp_sft.collate.spans import Found
from fsdp_sft.collate.template import ChatTemplate, describe_tokenizer
from fsdp_sft.errors import ChatTemplateError

NOTES = {
    "dropped": "the template leaves out a text of an answer, which is not trained",
    "no_end_of_turn": "the template writes nothing after the last answer, so nothing teaches the model to "
    "stop; pass a chat_template= that writes the token there on which generation is to stop",
    "end_of_turn_is_text": "what ends an answer is no token of this tokenizer: it is trained as text, and "
    "generation must be told to stop on it; better, add it with tokenizer.add_special_tokens, and load the "
    "model with new_vocab_size=len(tokenizer)",
    "prompt_differs": "the generation prompt (add_generation_prompt=True) is not the text that rows have in "
    "front of an answer, so the model is asked otherwise than it was trained; pass a chat_template= that "
    "prints the same for both, unless they differ on purpose",
    "start_in_a_token": "one token holds the end of the generation prompt and the beginning "
    "of an answer, and is not trained; pass a chat_template= whose prompt does not end with a space",
    "context_dropped": "the template leaves out a text of the system, a user or a tool, or the tools, so the "
    "model is trained without it; pass a chat_template= that prints it",
    "special_tokens": "a text of the row holds a special token, which the model reads as one and not as "
    "text, so it can begin or end a turn; take it out of the text, unless it is meant",
    "empty_reasoning": "the template prints an empty block of reasoning in front of an answer without any; "
    "it is trained with empty_reasoning='train' alone",
    "answer_cut_off": "max_length leaves nothing of an answer (truncation= says that it is meant)",
}
"""Remarks on rows that are kept, by their names in `FilterCounts`."""

_QUIET = ("dropped", "empty_reasoning")  # options say what becomes of them
# A few such rows do no harm: some templates end answers only if a question follows, and some tokens hold the
# beginning of certain answers alone.
_COMMON = ("no_end_of_turn", "start_in_a_token")


def notes_of(
    found: Found,
    template: ChatTemplate,
    conversation: Conversation,
    options: EncodeOptions,
) -> Iterator[str]:
    """Names of the notes on a row that its rendering shows.

    Args:
        found: The rendered conversation and its turns.
        template: The chat template.
        conversation: The conversation.
        options: Options of the encoding.

    Raises:
        ChatTemplateError: For a text that the template drops, unless the options let that pass.
    """
    yield from found.notes
    texts = (message.get(key) for message in conversation.messages for key in ("content", *REASONING_KEYS))
    if any(template.special_token.search(text) for text in texts if text):
        yield "special_tokens"
    question = max((i for i, message in enumerate(found.messages) if message["role"] == "user"), default=-1)
    # Reasoning before the last question is left out by design.
    lost = [leaf for leaf in found.dropped if leaf.part != "reasoning" or leaf.message >= question]
    if lost and options.on_dropped == "error":
        key = template.facts().reasoning_key if found.turns and lost[0].part == "reasoning" else ""
        hint = (
            f"give reasoning as {key!r}, which it prints; or "
            if key not in ("", *found.messages[lost[0].message])
            else ""
        )
        raise ChatTemplateError(
            f"the chat template of {describe_tokenizer(template.tokenizer)} does not print the "
            f"{lost[0].part} of message {lost[0].message}, {lost[0].texts[0][:60]!r}, so it would not be "
            f"trained: {hint}pass a chat_template= that prints it, leave the row out (filter_rows with "
            "on_error='count'), or train what is printed with on_dropped='count'",
            reason="dropped_text",
        )
    if lost:
        yield "dropped"
    if (found.turns or options.train_on == "all") and _lacks_context(found, conversation):
        yield "context_dropped"
    if found.turns:
        last = found.turns[-1]
        if found.messages[last.message]["role"] == "assistant" and last.stop_start == last.end:
            yield "no_end_of_turn"
        if not template.facts().stop_is_token:
            yield "end_of_turn_is_text"


def _lacks_context(found: Found, conversation: Conversation) -> bool:
    """Whether the template leaves out a text of another role than the assistant's, or all tools."""
    others = (message["content"].strip() for message in found.messages if message["role"] != "assistant")
    functions = [tool.get("function") or tool for tool in conversation.tools or ()]
    names = [str(one["name"]) for one in functions if isinstance(one, dict) and one.get("name")]
    ends = [0, *(edge for turn in found.turns for edge in (turn.start, turn.end)), len(found.text)]
    told = (found.text[begin:end] for begin, end in zip(ends[::2], ends[1::2], strict=True))
    # In the turns calls name tools too.
    return (bool(names) and not any(name in part for part in told for name in names)) or not all(
        occurs(found.text, text) for text in others
    )


def warn_of_notes(counts: Mapping[str, int], told: set[str]) -> None:
    """Warn of each note that was counted and is not among those `told`, to which it is added.

    Rank 0 alone warns; a worker of a data loader knows its rank by RANK.
    """
    worker = get_worker_info()
    for name in NOTES:
        # Of the common ones nearly all rows of a template have one or none: the first worker tells.
        is_common = name in _COMMON
        if name in _QUIET or name in told or (is_common and worker is not None and worker.id > 0):
            continue
        if counts.get(name, 0) > (counts["kept"] / 2 if is_common else 0):
            told.add(name)
            if this_rank() == 0 and os.environ.get("RANK", "0") == "0":
                warn_caller(f"{counts[name]} of {counts['kept']} rows are counted as {name}: {NOTES[name]}")
