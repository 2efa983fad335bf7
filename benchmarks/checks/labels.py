"""Which part of real chat data is trained, with real tokenizers, and a page to look at for each file.

    FSDP_SFT_DATA=DATA python -m benchmarks.checks.labels --pages PAGES

Tokenizers: those inside of mistral-common (SentencePiece and Tekken; both packages are needed), and a
byte-level BPE trained on the files. Each encodes every row twice: with a ChatML template, which takes any
row, and with the template of its own. For each there is the share of tokens that are targets, and how many
rows the template refused, with its reason. With ChatML the labels are checked: what is trained of a row holds
its answers, in order.
"""

import argparse
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fsdp_sft import ChatTemplateError, EncodedChat, encode_chat, render_labels_html
from fsdp_sft.collate.rows import read_row

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.reasoning_content %}"
    "{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROWS_ON_A_PAGE = 12


def data_files() -> dict[str, list[dict[str, Any]]]:
    """File name to rows."""
    folder = os.environ.get("FSDP_SFT_DATA")
    if not folder:
        raise SystemExit("FSDP_SFT_DATA must be a folder with chat data (.json lists or .jsonl)")
    found = {}
    for path in sorted(Path(folder).glob("*.json*")):
        text = path.read_text()
        found[path.name] = (
            json.loads(text)
            if path.suffix == ".json"
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
    return found


def trained_here(files: dict[str, list[dict[str, Any]]]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 8,000 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = (
        message["content"] for rows in files.values() for row in rows for message in read_row(row).messages
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<pad>"])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    made.chat_template = CHATML
    return made


def mistral_tokenizers() -> Iterator[tuple[str, Any]]:
    """(file, tokenizer with the template that mistral-common makes for it)."""
    import mistral_common
    from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template

    folder = Path(mistral_common.__file__).parent / "data"
    for path in sorted(folder.iterdir()):
        if path.name.startswith("tekken") and path.suffix == ".json":
            from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

            yield path.name, convert_tekken_tokenizer(str(path))
        elif ".model.v" in path.name:
            with tempfile.TemporaryDirectory() as temporary:
                shutil.copy(path, Path(temporary) / "tokenizer.model")
                config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "bos_token": "<s>"}
                (Path(temporary) / "tokenizer_config.json").write_text(json.dumps(config))
                tokenizer = AutoTokenizer.from_pretrained(temporary)
            try:
                tokenizer.chat_template = convert_tokenizer_to_chat_template(str(path))
            except Exception as error:
                print(f"    {path.name}: mistral-common makes no template for it: {error}")
            yield path.name, tokenizer


def check(row: dict[str, Any], tokenizer: Any, chat: EncodedChat) -> None:
    """Each run of trained text is made of one answer's texts in order, white space aside."""
    wanted = [m for m in read_row(row).messages if m["role"] == "assistant"]
    flags = [on for m, on in zip(*_messages(row), strict=True) if m["role"] == "assistant"]
    text = _squeezed(tokenizer.decode([label for label in chat.labels if label != -100]))
    position = 0
    for message, on in zip(wanted, flags, strict=True):
        for part in re.split(r"</?think>", message["content"]) if on else []:
            piece = _squeezed(part)
            at = text.find(piece, position)
            assert at >= 0, f"not trained: {part[:80]!r}"
            position = at + len(piece)


def _messages(row: dict[str, Any]) -> tuple[list[Any], list[bool]]:
    conversation = read_row(row)
    return conversation.messages, conversation.trained


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def encode_file(
    rows: list[dict[str, Any]], tokenizer: Any, template: str | None
) -> tuple[list[EncodedChat], Counter[str]]:
    """(the rows that the template takes, reasons of the others)."""
    encoded, refused = [], Counter[str]()
    for row in rows:
        try:
            chat = encode_chat(row, tokenizer, chat_template=template)
        except ChatTemplateError as error:
            refused[str(error)[:200]] += 1
            continue
        if template is not None:  # a template of a model may leave out reasoning of the past
            check(row, tokenizer, chat)
        encoded.append(chat)
    return encoded, refused


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=Path, help="folder for one page of HTML per file")
    options = parser.parse_args()
    files = data_files()
    own = trained_here(files)
    print("| tokenizer | template | file | rows | refused | tokens | targets | share |")
    print("|---|---|---|---|---|---|---|---|")
    reasons: Counter[str] = Counter()
    for name, tokenizer in [("BPE trained here", own), *mistral_tokenizers()]:
        for kind, template in (("ChatML", CHATML), ("its own", None)):
            if template is None and (tokenizer is own or not tokenizer.chat_template):
                continue
            for file, rows in files.items():
                chats, refused = encode_file(rows, tokenizer, template)
                reasons.update(refused)
                tokens, targets = sum(len(c.input_ids) for c in chats), sum(c.num_targets for c in chats)
                cells = (name, kind, file, len(rows), refused.total(), tokens, targets)
                print(f"| {' | '.join(map(str, cells))} | {targets / max(tokens, 1):.1%} |", flush=True)
                if options.pages and tokenizer is own:
                    options.pages.mkdir(parents=True, exist_ok=True)
                    shown = chats[:ROWS_ON_A_PAGE]
                    page = render_labels_html(
                        tokenizer, [c.input_ids for c in shown], [c.labels for c in shown], title=file
                    )
                    (options.pages / f"{Path(file).stem}.html").write_text(page, encoding="utf-8")
    for reason, count in reasons.most_common():
        print(f"    {count} rows refused: {reason}")


if __name__ == "__main__":
    main()
