"""How many files of src know each feature, beside its goal: ``python -m tests.harness.features``.

A file knows a feature if a name of its code, not a comment or a text, says it. A feature that few files know
can go, or change, without the others.
"""

import ast
import re
from pathlib import Path

from tests.harness.places import ROOT

# Names that say a feature, and the number of files to come to.
FEATURES = {
    "packed shards": (r"Packed(Shard|Weights|Layout)|packed_(shard|weights|digest)|pack_loaded|bits_of", 6),
    "context parallelism": (r"^(CP|cp|cp_\w+|context_parallel)$|sequence_group|SequenceGroup|WholeRows", 8),
    "expert parallelism": (r"^EP$|ep_size|expert_parallel|place_experts|EXPERTS_SHARD", 8),
    "adapters": (r"adapter|peft|lora_|modules_to_save", 6),
    "towers": (r"tower", 4),
    "compile": (r"is_compiling|being_compiled|is_compiled|compile_blocks|uncompiled|outside_of_graphs", 6),
}


def names_of(path: Path) -> set[str]:
    """The names that a file's code has: of variables, attributes, arguments, keywords, imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for field in ("id", "attr", "arg", "name", "module"):
            value = getattr(node, field, None)
            found.update(value.split(".") if isinstance(value, str) else ())
    return found


def known_to(pattern: str) -> list[str]:
    """The files of src that know a feature, by the pattern of its names."""
    src = ROOT / "src" / "fsdp_sft"
    files = sorted(src.rglob("*.py"))
    return [str(f.relative_to(src)) for f in files if any(re.search(pattern, n) for n in names_of(f))]


def main() -> None:
    for feature, (pattern, goal) in FEATURES.items():
        files = known_to(pattern)
        print(f"{feature}: {len(files)} files, goal {goal}\n    {' '.join(files)}")


if __name__ == "__main__":
    main()
