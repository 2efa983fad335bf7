#!/usr/bin/env bash
# transformers 5.23.0, Nemotron-H, Mamba 2, Falcon-H1 and others whose configs have an infinite bound; 5.24.0 does the same.
#
# One would expect: a config.json that save_pretrained wrote can be loaded by json, changed in a field and handed back,
#   SomeConfig.from_dict(json.loads(text)) or SomeConfig(**json.loads(text)), as conversion scripts and exporters do;
#   from_json_file of the same file differs only in opening the file itself.
# What happens: Infinity is written as {"__float__": "Infinity"}, which from_json_file and from_pretrained turn back and
#   from_dict does not. The strict classes of Nemotron-H, Mamba 2 and Falcon-H1 then raise for a field that nobody touched.
# Who is hit: whoever edits a config.json between a save and a load, and programs that read configs without transformers:
#   "time_step_limit": [0.0, {"__float__": "Infinity"}] is no bound to them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 torch==2.13.0 numpy 2>/dev/null
cat > "$folder/program.py" <<'PY'
import json
import sys
from pathlib import Path

import transformers
from transformers import FalconH1Config, Mamba2Config, NemotronHConfig

folder, found = Path(sys.argv[1]), {}
print("transformers", transformers.__version__)
for cls in (NemotronHConfig, Mamba2Config, FalconH1Config):
    at = folder / cls.__name__
    cls().save_pretrained(at)
    fields = json.loads((at / "config.json").read_text())
    infinite = {name: value for name, value in fields.items() if "__float__" in json.dumps(value)}
    again = cls.from_json_file(at / "config.json")
    try:
        read = {name: getattr(cls.from_dict(fields), name) for name in infinite}
    except Exception as error:
        read = type(error).__name__
    found[cls.__name__] = infinite, read
    print(f"{cls.__name__}: written {infinite}; from_json_file {[getattr(again, n) for n in infinite]}; from_dict {read}")
expected = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
same = all(written == expected and "Validation" in str(read) for written, read in found.values())
print("as described" if same else "CHANGED")
sys.exit(not same)
PY
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
