"""Notes on unusual rows that are kept, counted by name, and warnings about their templates."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fsdp_sft._process.callers import warn_caller
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft.collate.layout import TextSlot
from fsdp_sft.collate.messages import REASONING_KEYS
from fsdp_sft.collate.options import EncodeOptions
from fsdp_sft.collate.rows import Conversation, tool_name
from fsdp_sft.collate.spans import Found
from fsdp_sft.collate.template import ChatTemplate, describe_tokenizer
from fsdp_sft.errors import ChatTemplateError

NOTES = {
    "dropped": "the template leaves out a text of an answer, which is not trained",
    "no_end_of_turn": "the template writes nothing after the last answer, so nothing teaches the model to "
    "stop; pass a chat_template= that writes the token there on which generation is to stop",
    "end_of_turn_is_text": "what ends an answer is no token of this tokenizer; add it as one, and load the "
    "model with new_vocab_size=len(tokenizer)",
    "prompt_differs": "the generation prompt is not the text that rows have in front of an answer, so the "
    "model is asked otherwise than it was trained; pass a chat_template= that prints the same for both",
    "start_in_a_token": "one token holds the end of the generation prompt and the beginning "
    "of an answer, and is not trained; pass a chat_template= whose prompt does not end with a space",
    "context_dropped": "the template leaves out a text of the system, a user or a tool, or the tools, so the "
    "model is trained without it; pass a chat_template= that prints it",
    "longer_than_model": "the row has more tokens than the tokenizer says that its model takes "
    "(tokenizer.model_max_length); pass max_length=, or raise that if the model takes more",
    "special_tokens": "a text of the row holds a special token, which the model reads as one and not as "
    "text, so it can begin or end a turn; take it out of the text, unless it is meant",
    "empty_reasoning": "the template prints an empty block of reasoning in front of an answer without any; "
    "it is trained with empty_reasoning='train' alone",
    "answer_cut_off": "max_length leaves nothing of an answer (truncation= says that it is meant)",
}
"""Remarks on rows that are kept, by their names in `FilterCounts`."""

WARNED_OF_ROWS = (
    "no_end_of_turn",
    "start_in_a_token",
    "longer_than_model",
    "special_tokens",
)
"""Notes whose warning says how many rows have them."""

WARNED_OF_TEMPLATES = ("end_of_turn_is_text", "prompt_differs", "context_dropped")
"""Notes whose warning is given while rows are encoded, once for the template."""


def notes_of(
    found: Found,
    template: ChatTemplate,
    conversation: Conversation,
    options: EncodeOptions,
) -> Iterator[str]:
    """Names of the notes on a row, with a warning for each that is about its template.

    Args:
        found: The rendered conversation and its turns.
        template: The chat template.
        conversation: The conversation.
        options: Options of the encoding.

    Raises:
        ChatTemplateError: For a text that the template drops, unless the options let that pass.
    """
    texts = [message.get(key) for message in conversation.messages for key in ("content", *REASONING_KEYS)]
    if any(template.holds_special_token(text) for text in texts if text):
        yield "special_tokens"
    yield from _on_dropped(found, template, options)
    yield from _on_context(found, template, conversation, options)
    if found.differing:
        yield "prompt_differs"
        _warn(
            template,
            f"ends a question with {found.differing[0]!r} when it asks for an answer "
            f"(add_generation_prompt=True), and prints {found.differing[1]!r} in front of the answer that is "
            "trained: the model will be asked otherwise than it was trained; pass a chat_template= that "
            "prints the same for both, unless they differ on purpose (a prompt that opens reasoning does not "
            "count)",
        )
    if found.empty_reasoning is not None:
        if options.empty_reasoning == "error":
            raise ChatTemplateError(
                f"message {found.empty_reasoning} has no reasoning, and the chat template of "
                f"{describe_tokenizer(template.tokenizer)} prints an empty block of it, which "
                "empty_reasoning='error' refuses: give the reasoning, leave the row out, or pass 'mask'",
                reason="no_reasoning",
            )
        yield "empty_reasoning"
    if found.turns and options.train_eot:
        last = found.turns[-1]
        if conversation.messages[last.message]["role"] == "assistant" and last.stop_start == last.end:
            yield "no_end_of_turn"
        facts = template.facts()
        if not facts.stop_is_token:
            yield "end_of_turn_is_text"
            warn(
                f"answers end with {facts.end_of_turn!r}, which is no token of "
                f"{describe_tokenizer(template.tokenizer)}: it is trained as text, and generation must be "
                "told to stop on it; better, add it with tokenizer.add_special_tokens and load the model "
                "with new_vocab_size=len(tokenizer)"
            )


def _on_dropped(found: Found, template: ChatTemplate, options: EncodeOptions) -> Iterator[str]:
    """Notes on texts that the template leaves out."""
    if options.on_dropped == "ignore":
        return
    last_question = max((i for i, m in enumerate(found.messages) if m["role"] == "user"), default=-1)
    # Reasoning before the last question is left out by design.
    kept = (item for item in found.dropped if item.part != "reasoning" or item.message >= last_question)
    lost = next(kept, None)
    if lost is not None:
        if options.on_dropped == "error":
            raise _dropped_error(lost, template)
        yield "dropped"


def _on_context(
    found: Found, template: ChatTemplate, conversation: Conversation, options: EncodeOptions
) -> Iterator[str]:
    """The note on texts of other roles, or schemas of tools, that the template leaves out."""
    if options.on_dropped == "ignore":
        return
    names = [name for name in map(tool_name, conversation.tools or ()) if name]
    told = found.text
    for turn in reversed(found.turns):  # calls name their tools too
        told = told[: turn.start] + told[turn.end :]
    if names and not any(name in told for name in names):
        yield "context_dropped"
        _warn(
            template,
            "does not print the tools of some conversations: the model is trained to call what it was not "
            "told of; pass a chat_template= that prints them",
        )
    if found.context:
        yield "context_dropped"
        role = conversation.messages[found.context[0].message]["role"]
        _warn(
            template,
            f"does not print what some conversations have in a message of role {role!r}: the model is "
            "trained without it; pass a chat_template= that prints it",
        )


def warn(text: str) -> None:
    """Warn at the caller's line, on rank 0 alone; a worker of a data loader knows its rank by RANK."""
    if this_rank() == 0 and os.environ.get("RANK", "0") == "0":
        warn_caller(text)


def _warn(template: ChatTemplate, what: str) -> None:
    """Warn of what a template does."""
    warn(f"the chat template of {describe_tokenizer(template.tokenizer)} {what}")


def _dropped_error(lost: TextSlot, template: ChatTemplate) -> ChatTemplateError:
    """The error for a text that the template does not print."""
    key = template.facts().reasoning_key if lost.part == "reasoning" else ""
    text = lost.texts[0]
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    return ChatTemplateError(
        f"the chat template of {describe_tokenizer(template.tokenizer)} does not print the {lost.part} of "
        f"message {lost.message}, {shown!r}, so it would not be trained: "
        + (f"give reasoning as {key!r}, which it prints; or " if key else "")
        + "pass a chat_template= that prints it, leave the row out (filter_rows with on_error='count'), or "
        "train what is printed with on_dropped='count'",
        reason="dropped_text",
    )
