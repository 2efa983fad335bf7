#!/usr/bin/env bash
# transformers 5.23.0 (tokenizers as it pins them), a fast tokenizer that was called with padding=True or truncation=True.
#
# One would expect: padding and truncation are arguments of a call, so that the tokenizer is afterwards what it was before:
#   the same text of backend_tokenizer.to_str(), and the same file by save_pretrained.
# What happens: they are set on the backend and stay there until the next call sets others. Until then to_str() is another
#   text, and save_pretrained writes them: who reads that file with tokenizers alone gets padded rows (and cut ones,
#   without a word) that nobody asked for.
# Who is hit: who names a cache of encoded data by the tokenizer's text, and encodes all of it again, or on one rank
#   only, since that rank printed a padded sample; who serves an exported tokenizer.json outside of transformers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 2>/dev/null
"$folder/venv/bin/python" - "$folder" <<'PY' 2>/dev/null
import json
import sys
from pathlib import Path

import tokenizers
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
words = {word: number for number, word in enumerate(["<pad>", "<unk>", "one", "two", "three"])}
made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>")
before = tokenizer.backend_tokenizer.to_str()
tokenizer(["one", "one two three"], padding=True, truncation=True, max_length=2)
kept = json.loads(tokenizer.backend_tokenizer.to_str())
print("after a call with padding and truncation: padding", kept["padding"] is not None, ", truncation", kept["truncation"])
tokenizer.save_pretrained(sys.argv[1])
alone = Tokenizer.from_file(str(Path(sys.argv[1], "tokenizer.json")))
rows = [encoding.ids for encoding in alone.encode_batch(["one", "one two three"])]
print("tokenizers alone, from the file that was saved:", rows)
tokenizer("one")
again = tokenizer.backend_tokenizer.to_str() == before
print("after a plain call: as before", again)
same = kept["padding"] is not None and kept["truncation"] is not None and [*map(len, rows)] == [2, 2] and again
print("as described" if same else "CHANGED")
sys.exit(not same)
PY
