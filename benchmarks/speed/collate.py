"""Time to turn chats into labels: this library, transformers' generation tags, and prefix re-tokenisation.

    python -m benchmarks.speed.collate

Each way makes the same padded batches of 16 rows.

- tags: what transformers and TRL offer for templates with ``{% generation %}``: ``apply_chat_template``
  with ``return_assistant_tokens_mask=True``, a row at a time, as TRL maps its data sets. ``tags, batched``
  gives it 16 rows at a time, which TRL does not.
- prefixes: the chat is rendered and tokenised up to and after each answer, the common way otherwise.
- ours: ``SFTCollator``; ``ours, single`` is ``encode_chat`` on a row at a time.
- floor: the tokenizer alone, on texts that are there already, 16 at a time, nothing else done.

All use one ChatML template (with tags for ``tags`` only) and one byte-level BPE trained here; the tokenizer's
threads are left as they are. Each round times each way once. The exponent is that of seconds per row in the
number of messages, over all sizes, by least squares on logarithms.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from benchmarks.tables import publish, table
from fsdp_sft import SFTCollator, encode_chat

HEAD = ["messages", "tokens a row", "ours, k tokens/s", "tags / ours", "prefixes / ours"]
HEAD += ["tags / ours, single", "tags, batched / ours", "ours / floor", "prefixes / floor"]

PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BATCH = 16
RENDERED: dict[int, list[str]] = {}  # texts of the batches, for the floor
WORDS = [
    "the",
    "a",
    "of",
    "time",
    "model",
    "token",
    "loss",
    "rank",
    "shard",
    "step",
    "answer",
    "question",
    "house",
    "green",
    "water",
    "small",
    "seven",
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    generator = random.Random(0)
    text = [" ".join(generator.choices(WORDS, k=40)) for _ in range(500)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")


def make_rows(messages: int, rows: int, words: int) -> list[list[dict[str, Any]]]:
    generator = random.Random(messages)
    return [
        [
            {
                "role": ("user", "assistant")[i % 2],
                "content": " ".join(
                    generator.choices(WORDS, k=generator.randint(words // 2, 3 * words // 2))
                ),
            }
            for i in range(messages)
        ]
        for _ in range(rows)
    ]


Batch = dict[str, torch.Tensor]
Pair = tuple[list[int], list[int]]  # ids and labels of a row


def padded(tokenizer: Any, rows: list[Pair]) -> Batch:
    """A batch as the peers' collators make it."""
    ids, labels = ([torch.tensor(column) for column in columns] for columns in zip(*rows, strict=True))
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def ours(tokenizer: Any, chats: list[Any]) -> Batch:
    collate = SFTCollator(tokenizer, max_length=1 << 20, chat_template=PLAIN)
    return collate([{"messages": chat} for chat in chats])


def ours_single(tokenizer: Any, chats: list[Any]) -> Batch:
    encoded = [encode_chat({"messages": chat}, tokenizer, chat_template=PLAIN) for chat in chats]
    return padded(tokenizer, [(row.input_ids, row.labels) for row in encoded])


def tags(tokenizer: Any, chats: list[Any]) -> Batch:
    return padded(tokenizer, [pair for chat in chats for pair in tags_of(tokenizer, [chat])])


def tags_batched(tokenizer: Any, chats: list[Any]) -> Batch:
    return padded(tokenizer, tags_of(tokenizer, chats))


def prefixes(tokenizer: Any, chats: list[Any]) -> Batch:
    return padded(tokenizer, [prefixes_of(tokenizer, chat) for chat in chats])


def tags_of(tokenizer: Any, chats: list[Any]) -> list[Pair]:
    encoded = tokenizer.apply_chat_template(
        chats, chat_template=TAGGED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return [
        (ids, [token if on else -100 for token, on in zip(ids, mask, strict=True)])
        for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    ]


def floor(tokenizer: Any, chats: list[Any]) -> Batch:
    tokenizer(RENDERED[id(chats)], add_special_tokens=False, return_attention_mask=False)
    return {}


def prefixes_of(tokenizer: Any, chat: list[dict[str, Any]]) -> Pair:
    def ids(messages: list[dict[str, Any]], prompt: bool) -> list[int]:
        encoded = tokenizer.apply_chat_template(
            messages, chat_template=PLAIN, add_generation_prompt=prompt, tokenize=True, return_dict=True
        )
        return list(encoded["input_ids"])

    whole = ids(chat, False)
    labels = [-100] * len(whole)
    for index, message in enumerate(chat):
        if message["role"] == "assistant":
            start, end = len(ids(chat[:index], True)), len(ids(chat[: index + 1], False))
            # The newline after the stop token is not trained.
            labels[start : end - 1] = whole[start : end - 1]
    return whole, labels


def batches(rows: list[Any]) -> list[list[Any]]:
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--words", type=int, default=40, help="words of a message, on average")
    parser.add_argument("--output", type=Path, help="also write the table there")
    options = parser.parse_args()
    tokenizer = make_tokenizer()
    ways: dict[str, Callable[[Any, list[Any]], Batch]] = {
        "ours": ours,
        "ours, single": ours_single,
        "tags": tags,
        "tags, batched": tags_batched,
        "prefixes": prefixes,
        "floor": floor,
    }
    seconds: dict[str, dict[int, float]] = {name: {} for name in ways}
    rows_shown = []
    for messages in (2, 8, 32, 64):
        rows = make_rows(messages, max(16, 512 // messages), options.words)
        tokens = 0
        by_batch = batches(rows)
        for batch in by_batch:
            RENDERED[id(batch)] = tokenizer.apply_chat_template(batch, chat_template=PLAIN, tokenize=False)
            expected = tags(tokenizer, batch)
            tokens += int(expected["attention_mask"].sum())
            for name, way in ways.items():
                made = way(tokenizer, batch)
                assert all(torch.equal(made[key], expected[key]) for key in made), f"{name} differs"
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, way in ways.items():
                started = time.perf_counter()
                for batch in by_batch:
                    way(tokenizer, batch)
                times[name].append((time.perf_counter() - started) / len(rows))

        def ratio(name: str, other: str) -> float:
            return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))  # noqa: B023

        for name in ways:
            seconds[name][messages] = statistics.median(times[name])
        speed = tokens / len(rows) / seconds["ours"][messages] / 1e3
        ratios = [
            ("tags", "ours"),
            ("prefixes", "ours"),
            ("tags", "ours, single"),
            ("tags, batched", "ours"),
            ("ours", "floor"),
            ("prefixes", "floor"),
        ]
        shown = [f"{ratio(*pair):.2f}" for pair in ratios]
        rows_shown.append([messages, f"{tokens / len(rows):.0f}", f"{speed:.0f}", *shown])
    exponents = []
    for name, by_messages in seconds.items():
        x, y = [math.log(n) for n in by_messages], [math.log(s) for s in by_messages.values()]
        exponents.append(f"- {name}: exponent {statistics.linear_regression(x, y).slope:.2f}")
    publish("Collating chats", [*table(HEAD, rows_shown), "", *exponents], options.output)


if __name__ == "__main__":
    main()
