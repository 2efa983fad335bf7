"""The examples in docstrings of public names run, module by module; each public callable has one."""

import contextlib
import dataclasses
import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import fsdp_sft as fs
from tests.harness.places import script
from tests.harness.ranks import run_distributed

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
CHATS = [[("user", f"{i} + 1?"), ("assistant", f"{i + 1}")] for i in range(8)]


def _is_made_by_others(value: Any) -> bool:
    """An error, a result or a protocol: what raises, returns or takes it has the example."""
    return isinstance(value, type) and (
        issubclass(value, Exception)
        or dataclasses.is_dataclass(value)
        or getattr(value, "_is_protocol", False)
    )


CALLABLES = {
    name: value
    for name in sorted(fs.__all__)
    if callable(value := getattr(fs, name)) and not _is_made_by_others(value)
}


def _with_worked_examples() -> set[str]:
    """Modules whose docstrings have examples, whether or not they define public names."""
    root = Path(fs.__file__).parent
    return {
        ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for path in root.rglob("*.py")
        if ">>> " in path.read_text()
    }


def _given(words: set[str], folder: Path) -> dict[str, Any]:
    """What the examples use without making it; only what ``words`` ask for is made."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, AutoTokenizer

    made: dict[str, Any] = {"fs": fs, "torch": torch, "Path": Path}
    makes = {
        "path": lambda: _tiny(folder),
        "config": lambda: AutoConfig.from_pretrained(get("path")),
        "tokenizer": lambda: AutoTokenizer.from_pretrained(get("path")),
        "rows": lambda: [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in CHATS],
        "mesh": fs.build_mesh,
        "model": lambda: fs.load_pretrained(get("path"), mesh=get("mesh")),
        "optimizer": lambda: torch.optim.AdamW(get("model").parameters(), lr=1e-3),
        "loader": lambda: DataLoader(
            get("rows"), 2, collate_fn=fs.SFTCollator(get("tokenizer"), max_length=64)
        ),
        "batch": lambda: next(iter(get("loader"))),
        "window": lambda: [get("batch"), get("batch")],
        "dataset": lambda: [
            {"input_ids": list(range(3, 6 + n)), "labels": [-100, *range(4, 6 + n)]} for n in range(8)
        ],
    }

    def get(name: str) -> Any:
        if name not in made:
            made[name] = makes[name]()
        return made[name]

    for name in makes:
        if name in words:
            get(name)
    return made


def _tiny(folder: Path) -> str:
    script("tiny_model").make_tiny_model(folder / "tiny", [text for chat in CHATS for _, text in chat])
    return str(folder / "tiny")


def run_examples(name: str, folder: Path) -> list[str]:
    """On one rank: the reports of examples that print something else."""
    fs.init_distributed()
    reports: list[str] = []
    module = importlib.import_module(name)
    tests = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert tests, "there are none"
    for test in tests:
        words = {word for example in test.examples for word in re.findall(r"\w+", example.source)}
        empty = folder / test.name
        empty.mkdir()
        with contextlib.chdir(empty):
            test.globs.update(_given(words, folder / f"{test.name}.given"))
            doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(test, out=reports.append)
    return reports


@pytest.mark.parametrize("module", sorted(_with_worked_examples()))
def test_examples_run(module: str, tmp_path: Path) -> None:
    reports = run_distributed(run_examples, 1, module, tmp_path)[0]
    assert not reports, "\n".join(reports)


def test_public_callables_have_an_example() -> None:
    without = [name for name, value in CALLABLES.items() if ">>> " not in (inspect.getdoc(value) or "")]
    assert not without, without
