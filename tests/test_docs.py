"""Every python block in README and docs runs, page by page, as one program."""

import ast
import re
from pathlib import Path

import pytest

from tests.harness.forks import Program
from tests.harness.places import EXAMPLES, ROOT

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
    script = folder / "page.py"
    script.write_text(code)
    return Program(script).wait()


def _run(code: str, folder: Path, name: str) -> None:
    status, text = _outcome(code, folder)
    assert status == 0, f"{name}:\n{text[-3000:]}"


def _results(folder: Path) -> dict[str, bytes]:
    """What runs have left, without the pages' own stand-ins for a reader's model."""
    made = [path for path in folder.rglob("*") if path.is_file() and path.name != "page.py"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in made if "tiny" not in p.parts}


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
    trains = code.replace("\noptimizer = ", "\nraise AssertionError('it trains')\noptimizer = ")
    status, text = _outcome(trains, folder)
    assert status == 1
    assert "choose another, move it away, or pass" in text or "move it away, or go on from it" in text, text
    assert _results(folder) == before


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_python_block_is_run_or_marked(page: Path) -> None:
    text = page.read_text()
    assert len(PYTHON_FENCE.findall(text)) == len(BLOCK.findall(text))


def test_every_public_name_is_in_the_reference_and_every_page_on_the_site() -> None:
    import fsdp_sft as fs

    text = "".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    named = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: ")}
    assert named >= set(fs.__all__) - {"__version__"}
    navigation = {
        line.split()[-1] for line in (ROOT / "mkdocs.yml").read_text().splitlines() if ".md" in line
    }
    assert navigation == {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}


def test_every_public_exception_is_on_the_errors_page() -> None:
    import fsdp_sft as fs

    public = [getattr(fs, name) for name in fs.__all__]
    exceptions = {kind for kind in public if isinstance(kind, type) and issubclass(kind, BaseException)}
    page = (ROOT / "docs/reference/errors.md").read_text()
    rows = {
        row[0]: row for row in re.findall(r"^\| `(\w+)` \| (`.*?`) \| .+ \| .+ \| .+ \|$", page, re.MULTILINE)
    }
    assert rows.keys() == {kind.__name__ for kind in exceptions}
    for kind in exceptions:
        assert rows[kind.__name__][1] == ", ".join(f"`{base.__name__}`" for base in kind.__bases__)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


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
