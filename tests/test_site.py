"""The site: its links, its index of names, what fits on a page, and the figures of its first page."""

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_sft as fs
from mkdocs_hooks.links import add_readme, link_names, targets
from tests.harness.places import EXAMPLES, ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
FIGURE = re.compile(r"\d(?:[\d.,]*\d)?(?:e[+-]\d+)?%?")


def _uri(page: Path) -> str:
    return str(page.relative_to(DOCS))


def _leads_to(page: Path) -> set[Path]:
    """Pages that the text of a page links to."""
    targets = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets}


def test_the_index_has_every_public_name_once() -> None:
    names = re.findall(r"^- `(\w+)`$", (DOCS / "reference/index.md").read_text(), re.MULTILINE)
    assert sorted(names) == sorted({*fs.__all__} - {"__version__"})
    assert targets().keys() >= set(names)


def test_public_names_become_links_once_and_code_stays() -> None:
    text = (
        "# `train_step`\n`fs.train_step(a)`, `train_step`, `train`\n[`windows`](x.md)\n```\n`evaluate`\n```\n"
    )
    linked = text.replace("`fs.train_step(a)`", "[`fs.train_step(a)`][fsdp_sft.step.train_step]")
    assert link_names(text, "how-to/x.md") == linked
    text = "`benchmarks/results/load.md`, [it](../../benchmarks/results/load.md#memory)"
    linked = "[`benchmarks/results/load.md`](../results/load.md), [it](../results/load.md#memory)"
    assert link_names(text, "how-to/x.md") == linked


def test_every_page_is_two_clicks_from_the_first() -> None:
    first = _leads_to(DOCS / "index.md")
    second = {page for near in first if near.suffix == ".md" for page in _leads_to(near)}
    assert {_uri(page) for page in PAGES} - {_uri(p) for p in (first | second) if DOCS in p.parents} <= {
        "index.md"
    }


def test_every_file_of_results_is_on_the_page_of_measurements() -> None:
    results = {path for path in _leads_to(DOCS / "measurements.md") if DOCS not in path.parents}
    assert results == set((ROOT / "benchmarks/results").glob("*.md"))


def _table(page: Path, begins: str) -> list[list[str]]:
    """Rows of the table whose first line begins so, by cells."""
    table = re.search(rf"^{re.escape(begins)}.*?(?=^$)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert table is not None, begins
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines()[2:]]


def test_figures_of_the_first_page_stand_in_the_files_that_it_links() -> None:
    compared = _table(DOCS / "measurements.md", "| | fsdp-sft |")
    measured = [[what, ours, "", link] for what, ours, link in _table(ROOT / "README.md", "| measured |")]
    assert len(compared) == 15
    assert len(measured) == 6
    for what, ours, others, details in compared + measured:
        file = re.search(r"\((?:\.\./)?benchmarks/results/([\w-]+\.md)(?:#[\w-]+)?\)", details)
        assert file is not None, what
        figures = set(FIGURE.findall((ROOT / "benchmarks/results" / file[1]).read_text()))
        for figure in FIGURE.findall(f"{what} {ours} {others}"):
            assert figure in figures, f"{what}: {figure}"


def test_plans_of_well_known_models_are_the_planners() -> None:
    """Those of one model are computed again."""
    command = [sys.executable, "-m", "benchmarks.published.models", "--only", "Llama 3.1 8B"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
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


def test_the_picture_of_comparisons_finds_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "benchmarks.comparisons", "--output", str(tmp_path / "drawn.png")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "drawn.png").stat().st_size > 10_000
