"""Every python block in README and docs runs, page by page, as one program; so do examples in docstrings."""

import ast
import contextlib
import dataclasses
import difflib
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fsdp_sft as fs
from mkdocs_hooks.links import add_readme, link_names, targets
from tests.harness.forks import Program
from tests.harness.places import EXAMPLES, ROOT, script
from tests.harness.ranks import run_distributed

PAGES = sorted([*ROOT.glob("*.md"), ROOT / "llms.txt", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Pages about an extra run where it is installed.
EXTRAS = {"accelerate", "peft"}
PYTHON_FENCE = re.compile(r"^```(?:python|py)\b.*$", re.MULTILINE)

# README's loops are fragments of a reader's own program: the names they take for granted are made here.
SETUP = """
import os, sys
sys.path.insert(0, {examples!r})
from pathlib import Path
from tiny_model import make_tiny_model
chats = [[("user", f"{{i}} + 1?"), ("assistant", f"{{i + 1}}")] for i in range(64)]
rows = [{{"messages": [{{"role": role, "content": text}} for role, text in chat]}} for chat in chats]
path = Path("tiny").resolve()
make_tiny_model(path, [m["content"] for row in rows for m in row["messages"]])
"""
# A page that begins with `python examples/tiny_model.py tiny` runs in a clone.
CLONE_SETUP = """
from pathlib import Path
import runpy, sys
if not Path("examples").exists():
    Path("examples").symlink_to({examples!r})
    sys.argv = ["tiny_model.py", "tiny"]
    runpy.run_path("examples/tiny_model.py", run_name="__main__")
"""
# The loop of a page reads a model from the Hub, and rows from a clone.
LOOP_SETUP = """
import json
Path("examples/data").mkdir(parents=True, exist_ok=True)
Path("examples/data/chats.jsonl").write_text("\\n".join(map(json.dumps, rows)))
"""
LOOP_MODEL = '"Qwen/Qwen2.5-0.5B-Instruct"'
LOOP_CHECK = """
assert result.loss > 0 and step == 4
from transformers import AutoModelForCausalLM
assert AutoModelForCausalLM.from_pretrained("out").config.num_hidden_layers == 4
"""
# README's own step takes for granted what its first loop makes.
STEP_SETUP = """
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
import fsdp_sft as fs
context = fs.init_distributed()
collate = fs.SFTCollator(AutoTokenizer.from_pretrained(path), max_length=64)
loader = DataLoader(rows, 2, sampler=fs.ResumableSampler(rows), collate_fn=collate)
"""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _setup(page: Path) -> str:
    if "python examples/tiny_model.py tiny" in page.read_text():
        return CLONE_SETUP.format(examples=str(EXAMPLES))
    setup = SETUP.format(examples=str(EXAMPLES))
    if page == ROOT / "README.md":
        return setup + STEP_SETUP
    if _has_the_loop(page):
        return setup + LOOP_SETUP
    return setup * (page.name == "what-went.md")


def _has_the_loop(page: Path) -> bool:
    return page == ROOT / "docs/how-to/from-a-plain-loop.md"


def _imports(code: str) -> set[str]:
    """The top-level packages that a program imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.split(".")[0] for name in names}


def _outcome(code: str, folder: Path) -> tuple[int | None, str]:
    (script := folder / "page.py").write_text(code)
    return Program(script).wait()


def _run(code: str, folder: Path, name: str) -> None:
    status, text = _outcome(code, folder)
    assert status == 0, f"{name}:\n{text[-3000:]}"


def _results(folder: Path) -> dict[str, bytes]:
    """What runs have left, without the pages' own stand-ins for a reader's model."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "page.py" and "tiny" not in path.parts
    }


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=_name)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    code = _setup(page) + "\n".join(blocks)
    for name in _imports(code) & EXTRAS:
        pytest.importorskip(name, reason=f"{page.name} is about the {name!r} extra")
    if _has_the_loop(page):
        assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 26, "a loop of 25 lines"
        assert LOOP_MODEL in blocks[0]
        code = code.replace(LOOP_MODEL, "path") + LOOP_CHECK
    _run(code, tmp_path, page.name)
    if _has_the_loop(page) or page.name == "quickstart.md":
        _run_again(code, tmp_path)


def _run_again(code: str, folder: Path) -> None:
    """The second run is told what to do, before it trains, and what the first has made stays as it is."""
    before = _results(folder)
    status, text = _outcome(
        code.replace("\noptimizer = ", "\nraise AssertionError('it trains')\noptimizer = "), folder
    )
    assert status == 1
    assert "choose another, move it away, or pass" in text or "move it away, or go on from it" in text, text
    assert _results(folder) == before


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_python_block_is_run_or_marked(page: Path) -> None:
    assert len(PYTHON_FENCE.findall(page.read_text())) == len(BLOCK.findall(page.read_text()))


def test_every_public_name_is_in_the_reference_and_every_page_on_the_site() -> None:
    text = "".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    named = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: ")}
    assert named >= set(fs.__all__) - {"__version__"}
    navigation = {
        line.split()[-1] for line in (ROOT / "mkdocs.yml").read_text().splitlines() if ".md" in line
    }
    assert navigation == {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}


def test_every_public_exception_is_on_the_errors_page() -> None:
    exceptions = {
        kind
        for name in fs.__all__
        if isinstance(kind := getattr(fs, name), type) and issubclass(kind, BaseException)
    }
    page = (ROOT / "docs/reference/errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (`.*?`) \| .+ \| .+ \| .+ \|$", page, re.MULTILINE))
    assert rows == {
        kind.__name__: ", ".join(f"`{base.__name__}`" for base in kind.__bases__) for kind in exceptions
    }


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    on_site = [DOCS, ROOT / "benchmarks/results"] if DOCS in page.parents else [ROOT]
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            found = (page.parent / target).resolve()
            assert any(found.exists() and found.is_relative_to(place) for place in on_site), target


def test_files_that_architecture_names_are_there() -> None:
    """Paths with a folder, from the repository's root or from ``src/fsdp_sft``; patterns are left out."""
    text = (ROOT / "ARCHITECTURE.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|md|json|sbatch))`", text))
    assert len(named) > 60
    absent = [name for name in named if not any((at / name).exists() for at in (ROOT, ROOT / "src/fsdp_sft"))]
    assert not absent, absent


@pytest.mark.parametrize("name", ["plain", "fsdp"])
def test_both_sides_of_readmes_difference_run(name: str, tmp_path: Path) -> None:
    text = (EXAMPLES / f"loop_{name}.py").read_text()
    assert LOOP_MODEL in text
    code = SETUP.format(examples=str(EXAMPLES)) + LOOP_SETUP + text.replace(LOOP_MODEL, "path")
    if name == "fsdp":
        code += "\nassert result.loss > 0\n"
    check = """
from transformers import AutoModelForCausalLM
assert AutoModelForCausalLM.from_pretrained("out").config.num_hidden_layers == 4
"""
    _run(code + check, tmp_path, f"loop_{name}.py")


# --- the site: its links, its index of names, what fits on a page, and the figures of its first page --------

DOCS = ROOT / "docs"
SITE_PAGES = sorted(DOCS.glob("**/*.md"))
FIGURE = re.compile(r"\d(?:[\d.,]*\d)?(?:e[+-]\d+)?%?")


def _leads_to(page: Path) -> set[Path]:
    """Pages that the text of a page links to."""
    return {
        (page.parent / target).resolve()
        for target in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text())
    }


def test_the_index_has_every_public_name_once() -> None:
    names = re.findall(r"^- `(\w+)`$", (DOCS / "reference/index.md").read_text(), re.MULTILINE)
    assert sorted(names) == sorted({*fs.__all__} - {"__version__"})
    assert targets().keys() >= set(names)


@pytest.mark.parametrize(
    ("text", "linked"),
    [
        (
            "# `train_step`\n`fs.train_step(a)`, `train_step`, `train`\n[`windows`](x.md)\n"
            "```\n`evaluate`\n```\n",
            "# `train_step`\n[`fs.train_step(a)`][fsdp_sft.step.train_step], `train_step`, `train`\n"
            "[`windows`](x.md)\n```\n`evaluate`\n```\n",
        ),
        (
            "`benchmarks/results/load.md`, [it](../../benchmarks/results/load.md#memory)",
            "[`benchmarks/results/load.md`](../results/load.md), [it](../results/load.md#memory)",
        ),
    ],
)
def test_public_names_become_links_once_and_code_stays(text: str, linked: str) -> None:
    assert link_names(text, "how-to/x.md") == linked


def test_every_page_is_two_clicks_from_the_first() -> None:
    first = _leads_to(DOCS / "index.md")
    second = {page for near in first if near.suffix == ".md" for page in _leads_to(near)}
    assert {*SITE_PAGES} - first - second <= {DOCS / "index.md"}


def test_every_file_of_results_is_on_the_page_of_measurements() -> None:
    assert {path for path in _leads_to(DOCS / "measurements.md") if DOCS not in path.parents} == set(
        (ROOT / "benchmarks/results").glob("*.md")
    )


def _table(page: Path, begins: str) -> list[list[str]]:
    """Rows of the table whose first line begins so, by cells."""
    table = re.search(rf"^{re.escape(begins)}.*?(?=^$)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert table is not None, begins
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines()[2:]]


def test_figures_of_the_first_page_stand_in_the_files_that_it_links() -> None:
    compared = _table(DOCS / "measurements.md", "| | fsdp-sft |")
    measured = [[what, ours, "", link] for what, ours, link in _table(ROOT / "README.md", "| measured |")]
    assert (len(compared), len(measured)) == (16, 6)
    for what, ours, others, details in compared + measured:
        file = re.search(r"\((?:\.\./)?benchmarks/results/([\w-]+\.md)(?:#[\w-]+)?\)", details)
        assert file is not None, what
        figures = set(FIGURE.findall((ROOT / "benchmarks/results" / file[1]).read_text()))
        for figure in FIGURE.findall(f"{what} {ours} {others}"):
            assert figure in figures, f"{what}: {figure}"


def test_plans_of_well_known_models_are_the_planners() -> None:
    """Those of one model are computed again."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.published.models", "--only", "Llama 3.1 8B"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(lines) == 3
    assert set(lines) <= set((DOCS / "how-to/plan-a-run.md").read_text().splitlines())


def test_the_first_page_begins_as_readme_does() -> None:
    home = add_readme((DOCS / "index.md").read_text())
    assert home.startswith("# fsdp-sft\n")
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", home)]
    assert len(links) > 40
    assert [target for target in links if "://" not in target and not (DOCS / target).exists()] == []


def test_readme_is_short_and_shows_how_the_two_loops_differ() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1100
    plain, fsdp = (
        (EXAMPLES / f"loop_{name}.py").read_text().partition('"""\n\n')[2].splitlines()
        for name in ("plain", "fsdp")
    )
    lines = [line.rstrip() for line in list(difflib.unified_diff(plain, fsdp, n=99, lineterm=""))[3:]]
    assert "```diff\n" + "\n".join(lines) + "\n```" in text


def test_the_picture_of_comparisons_has_the_figures_of_the_results(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")  # comes with matplotlib
    subprocess.run(
        [sys.executable, "-m", "benchmarks.comparisons", "--output", str(tmp_path / "drawn.png")],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    shown = image.open(DOCS / "images/comparisons.png").info["Description"]
    assert image.open(tmp_path / "drawn.png").info["Description"] == shown


# --- examples in docstrings, module by module; each public callable has one --------------------------------

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
    tests = [t for t in doctest.DocTestFinder().find(importlib.import_module(name)) if t.examples]
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
