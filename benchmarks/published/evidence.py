"""What others have published of memory and speed, which the planner is held against; see compare.py.

evidence.json has, a line for each:

- configs: model (Hub id, or the source's own name) to the fields of its transformers config;
- fits: does it fit, with the answer and, where the source has it, the memory in GiB (2**30);
- speeds: tokens a second of one GPU;
- gpu_sizes: what nvidia-smi and torch report of devices, beside what they are sold with;
- overheads: what processes take of a device outside of torch's allocator.

A row leaves out what is as in "defaults". measured_kind says what was measured ("allocated", "reserved" or
"nvidia-smi"), unsure names the fields that the source does not state, quote has a source's words, or the
cells of its table.
"""

import json
from pathlib import Path
from typing import Any

_FOUND = json.loads((Path(__file__).parent / "evidence.json").read_text())


def _rows(name: str) -> list[dict[str, Any]]:
    whole = ({**_FOUND["defaults"], **row} for row in _FOUND[name])
    return [{**row, "config": _FOUND["configs"][row["model"]]} for row in whole]


FITS = _rows("fits")
SPEEDS = _rows("speeds")
