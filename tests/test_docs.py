"""Every python block in README and docs runs, page by page, as one program."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# README's loops are fragments of a reader's own program: the names they take for granted are made here.
README_SETUP = """
import os, sys
sys.path.insert(0, {examples!r})
from pathlib import Path
from tiny_model import make_tiny_model
chats = [[("user", f"{{i}} + 1?"), ("assistant", f"{{i + 1}}")] for i in range(64)]
rows = [{{"messages": [{{"role": role, "content": text}} for role, text in chat]}} for chat in chats]
path = Path("tiny").resolve()
make_tiny_model(path, [m["content"] for row in rows for m in row["messages"]])
"""
README_CHECK = """
assert result.loss > 0 and step == 4
from transformers import AutoModelForCausalLM
assert AutoModelForCausalLM.from_pretrained("out").config.num_hidden_layers == 4
"""


def _with_python(page: Path) -> bool:
    return BLOCK.search(page.read_text()) is not None


@pytest.mark.parametrize(
    "page", [p for p in PAGES if _with_python(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    code = "\n".join(blocks)
    if page.name == "README.md":
        assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 26, "a loop of 25 lines"
        code = README_SETUP.format(examples=str(ROOT / "examples")) + code + README_CHECK
    script = tmp_path / "page.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{page.name}:\n{done.stderr[-3000:]}"


def test_every_public_name_is_in_the_reference_and_every_page_on_the_site() -> None:
    import fsdp_sft as fs

    text = "".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    named = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: ")}
    assert named == set(fs.__all__) - {"__version__"}
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob("docs/**/*.md"):
        assert f": {page.relative_to(ROOT / 'docs')}" in navigation, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
