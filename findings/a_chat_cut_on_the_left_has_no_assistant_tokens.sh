#!/usr/bin/env bash
# transformers 5.23.0, apply_chat_template(return_assistant_tokens_mask=True, truncation=True); 5.24.0 marks what is left.
#
# One would expect: a chat that is too long for max_length is cut by the tokenizer, and the mask of the assistant's tokens with
#   it, on either side: with truncation_side="left", which keeps the latest turns, these are marked as before.
# What happens: turns are looked up in their order, and the search ends at the first that begins in what was cut away, which is
#   taken for the end of the row. Cut on the right that is so. Cut on the left it is the first turn, so that none is marked: a
#   long chat loses the labels of all its answers at once, and a loss over no token is 0, or NaN, or the row is left out.
# Who is hit: whoever lets apply_chat_template cut long chats for a model that should see their end (agents, support chats).
#   Truncation after the call, of ids and mask alike, is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 jinja2 2>/dev/null
cat > "$folder/program.py" <<'PY'
import sys

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
inner = Tokenizer(models.BPE(vocab=letters, merges=[]))  # a token for each byte
inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
inner.decoder = decoders.ByteLevel()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
tokenizer.chat_template = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }};{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
)
chat = [
    {"role": role, "content": text}
    for role, text in [("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2 of them")]
]


def marked(side, most):
    """What the tokenizer keeps of the chat, and what of it is marked."""
    tokenizer.truncation_side = side
    row = tokenizer.apply_chat_template(
        chat,
        return_dict=True,
        return_assistant_tokens_mask=True,
        truncation=most is not None,
        max_length=most,
    )
    pairs = list(zip(row["input_ids"], row["assistant_masks"], strict=True))
    return tokenizer.decode([i for i, _ in pairs]), tokenizer.decode([i for i, one in pairs if one])


print("transformers", transformers.__version__)
found = {}
for side, most in (("right", None), ("right", 49), ("left", 44), ("left", 30), ("left", 22)):
    kept, found[side, most] = marked(side, most)
    print(f"{side:5} {most or 'uncut'}: kept {kept!r}, marked {found[side, most]!r}")
holds = found["right", None] == "1;2 of them;" and found["right", 49] == "1;2 o"
holds &= found["left", 44] == "1;2 of them;" and found["left", 30] == found["left", 22] == ""
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
