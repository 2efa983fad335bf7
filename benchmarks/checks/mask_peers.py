r"""Tokens that three ways label wrongly on the same 20 chat templates: ours, TRL's and axolotl's.

    pip install --no-deps --target PEERS trl==1.16.0 axolotl==0.19.0 addict colorama datasets pyarrow pandas \
        dill multiprocess xxhash requests urllib3 charset_normalizer certifi pytz
    PYTHONPATH=src:. python -m benchmarks.checks.mask_peers PEERS --counts counts.json --output mask-peers.md

Needs a clone and accelerate; nothing is stubbed. A template in the file of counts is not counted again.
Ours: `encode_chat`. TRL: `assistant_only_loss=True`, as `SFTTrainer` tokenises it, with the training template
that it puts in. axolotl: its `chat_template` strategy with `roles_to_train: [assistant]` and `train_on_eos:
turn`; gpt-oss with three `eot_tokens`. Templates: families that TRL and axolotl both carry, then
those of TRL that have a training template, in alphabetical order; without those that take contents as parts
only, which both label for processors elsewhere. Then, apart, axolotl's own templates of these families.

The judge exchanges each letter and digit of a conversation and renders it again. Who renders another text is
judged on that text. Left open: white space where a template has generation tags, empty blocks of reasoning,
and what stands between the first token that stops an answer and the next message. Where the judge cannot tell
for one way, the conversation counts for none.
"""

import argparse
import json
import re
import sys
from collections import Counter
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from benchmarks.tables import publish, table
from fsdp_sft.collate import EncodedChat, encode_chat

# Tests are no part of an installation; these are looked up in the clone.
corpus, oracle = import_module("tests.collate.corpus"), import_module("tests.collate.mask_oracle")
tokenizers = import_module("tests.collate.template_tokenizers")

# TRL's name of a family to axolotl's.
SHARED = {
    "cohere": "cohere", "deepseekv3": "deepseek_v3", "gemma": "gemma", "gemma3": "gemma3", "gemma4": "gemma4",
    "llama3": "llama3", "phi3": "phi_3", "phi3_5": "phi_35", "qwen2_5": "qwen_25", "qwen2_5_vl": "qwen2_vl",
    "qwen3": "qwen3", "qwen3_5_think": "qwen3_5",
}  # fmt: skip
NEXT = ["cohere2", "deepseek_r1_distill", "diffusion_gemma", "glm4moe", "gptoss", "lfm2", "lfm2_v2"]
NEXT += ["muse_glimmer"]
CONVERSATIONS, SHOWN = 20, 2
GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")
EMPTY_BLOCK = re.compile(r"\s*<think>\s*</think>\s*|<\|channel>thought\s*<channel\|>")


# Each way gives the template that it renders, messages if they are others than it was given, and labels.
def ours(tokenizer: Any, row: dict[str, Any]) -> tuple[str, Any, EncodedChat]:
    return tokenizer.chat_template, None, encode_chat(row, tokenizer)


def trl(tokenizer: Any, row: dict[str, Any]) -> tuple[str, Any, EncodedChat]:
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers
    from trl.data_utils import _tokenize

    template = tokenizer.chat_template
    if not has_generation_markers(template):
        template = get_training_chat_template(tokenizer)
    kwargs = {"chat_template": template, "tools": row.get("tools"), **row["chat_template_kwargs"]}
    found = _tokenize(tokenizer, row["messages"], return_assistant_tokens_mask=True, **kwargs)
    pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
    return template, None, EncodedChat(found["input_ids"], [i if mask else -100 for i, mask in pairs])


def axolotl(tokenizer: Any, row: dict[str, Any]) -> tuple[str, Any, EncodedChat]:
    from axolotl.prompt_strategies.chat_template import load
    from axolotl.utils.dict import DictDefault

    config = DictDefault(sequence_len=8192, chat_template_kwargs=row.pop("chat_template_kwargs"))
    is_gpt_oss = "<|call|>" in tokenizer.get_vocab()
    config["eot_tokens"] = ["<|return|>", "<|call|>", "<|end|>"] if is_gpt_oss else None
    strategy = load(tokenizer, config, DictDefault(roles_to_train=["assistant"], train_on_eos="turn"))
    found = strategy.tokenize_prompt(row)
    turns = strategy.get_conversation_thread(row)  # in which parts are texts and arguments objects
    return tokenizer.chat_template, turns, EncodedChat(found["input_ids"], found["labels"])


WAYS = {"fsdp_sft": ours, "TRL": trl, "axolotl": axolotl}


def without_nulls(value: Any) -> Any:
    """The value as axolotl makes it in any case."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def in_form(messages: list[dict[str, Any]], form: int) -> list[dict[str, Any]]:
    """Messages in one of the four forms of `forms`: calls' arguments as JSON (1), contents as parts (2)."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", []) if form & 1 else []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        if form & 2:
            message["content"] = [{"type": "text", "text": message["content"]}]
    return messages


def judged(render: Any, template: str, messages: Any, specials: list[str]) -> tuple[str, list[Any]] | None:
    """(text, flags of its characters), or None where the template raises or the judge cannot tell."""
    known: dict[str, str] = {}

    def remembered(given: Any, prompt: bool) -> str:
        key = json.dumps([given, prompt])
        known[key] = known.get(key) or render(given, prompt)
        return known[key]

    try:
        marks = oracle.trained_characters(remembered, messages, specials)
        tags = template if GENERATION_TAG.search(template) else ""
        marks = corpus.open_after_stops(tags, remembered, messages, marks)
    except Exception:
        return None
    text = remembered(messages, False)
    for block in EMPTY_BLOCK.finditer(text):
        for at in range(*block.span()):
            marks[at] = marks[at] and None  # who trains what the prompt has is wrong all the same
    return text, marks


def count(name: str, template: str) -> dict[str, Counter[str]]:
    """Counts of each way on one template; the first places that are wrong are printed."""
    tokenizer, specials = tokenizers.tokenizer_for(template)
    total: dict[str, Counter[str]] = {way: Counter() for way in ["all", *WAYS]}
    for seed in range(CONVERSATIONS):
        messages, tools, kwargs = map(without_nulls, corpus.conversation(seed))
        renders = list(tokenizers.forms(tokenizer, tools, kwargs))
        found = ((form, judged(render, template, messages, specials)) for form, render in enumerate(renders))
        form, plain = next((one for one in found if one[1]), (0, None))
        if plain is None:
            continue
        if seed % 5 == 0:
            parts = judged(renders[form | 2], template, messages, specials)
            form |= 2 * (parts is not None and parts[0] == plain[0])
        row = {"messages": in_form(messages, form), "chat_template_kwargs": kwargs, "tools": tools}
        results = {}
        for way, encode in WAYS.items():
            try:
                used, turns, chat = encode(tokenizer, json.loads(json.dumps(row)))
            except Exception as error:
                results[way] = Counter([f"refused: {getattr(error, 'reason', type(error).__name__)}"])
                continue
            variables = {**kwargs, "chat_template": used}
            render = list(tokenizers.forms(tokenizer, tools, variables))[0 if turns else form]
            same = used == template and turns in (None, messages)
            wanted = plain if same else judged(render, used, turns or messages, specials)
            results[way] = wanted and compared(tokenizer, *wanted, chat)
            if wanted is not None:
                results[way]["other text"] = int(wanted[0] != plain[0])
                if results[way]["wrong"] and total[way]["wrong"] < SHOWN:
                    print(f"  {name} {seed}, {way}: {oracle.difference(tokenizer, *wanted, chat)}")
        if all(results.values()):
            total["all"].update(judged=1, trained=plain[1].count(True))
            for way, counts in results.items():
                total[way] += counts
    return total


def compared(tokenizer: Any, text: str, marks: list[Any], chat: EncodedChat) -> Counter[str]:
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert whole["input_ids"] == chat.input_ids, f"{text!r}\n{tokenizer.decode(chat.input_ids)!r}"
    wanted = [marks[start] for start, _ in whole["offset_mapping"]]
    wrong = [mark for mark, i in zip(wanted, chat.labels, strict=True) if mark not in (None, i != -100)]
    return Counter(encoded=1, missed=wrong.count(True), extra=wrong.count(False), wrong=int(bool(wrong)))


def cell(found: Counter[str]) -> str:
    """``missed, extra (wrong conversations)``, then what is refused, or rendered as another text."""
    shown = [f"{found['missed']}, {found['extra']} ({found['wrong']})"] if found["encoded"] else []
    others = sorted(found.keys() - {"missed", "extra", "wrong", "encoded"})
    return "; ".join([*shown, *(f"{kind} {found[kind]}" for kind in others)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", type=Path, nargs="+", help="folders with TRL and axolotl")
    parser.add_argument("--counts", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    sys.path.extend(map(str, options.peers))  # behind what is installed
    counts = json.loads(options.counts.read_text()) if options.counts.exists() else {}
    own = files("axolotl") / "utils/chat_templates/templates"
    paths = {f"trl/{name}": files("trl") / f"chat_templates/{name}.jinja" for name in [*SHARED, *NEXT]}
    paths |= {f"axolotl/{name}": own / f"{name}.jinja" for name in SHARED.values()}
    for name in [name for name in paths if name not in counts]:
        counts[name] = count(name, paths[name].read_text())
        options.counts.write_text(json.dumps(counts, indent=1))
    rows = [[n, *counts[n]["all"].values(), *(cell(Counter(counts[n][way])) for way in WAYS)] for n in paths]
    lines = table(["template", "conversations", "characters to train", *WAYS], rows)
    versions = ", ".join(f"{name} {version(name)}" for name in ("trl", "axolotl", "transformers"))
    publish("Masks beside TRL and axolotl", [versions, "", *lines], options.output)


if __name__ == "__main__":
    main()
