"""What the site adds to its pages: README on the first, links, summaries, measurements, diffs that copy.

The Markdown files stay as they are read elsewhere: a public name in code, such as `train_step`, becomes a
link where it is first mentioned on a page, and so does the name of a file in benchmarks/results.
"""

import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
HOME = "index.md"
INDEX = "reference/index.md"
# Where the first page has what README begins with, and the heading before which that ends.
README_HERE = "<!-- Here the site has README, up to its plan. -->"
README_ENDS = "## Before you book GPUs"
# A fenced block, a line that is a heading or a directive, and a link: what is left alone. Then a code span.
_PARTS = re.compile(
    r"(?P<leave>^(?P<fence>```+).*?^(?P=fence)$|^#.*?$|^:::.*?$|\[(?:[^\[\]]|\[[^\]]*\])*\](?:\([^)]*\)|\[[^\]]*\]))"
    r"|(?<!`)`(?P<code>[^`\n]+)`(?!`)",
    re.MULTILINE | re.DOTALL,
)
_NAME = re.compile(r"(?:fs\.|fsdp_sft\.)?(\w+)(?:\(.*)?$", re.DOTALL)
_RESULT = re.compile(r"benchmarks/results/([\w-]+\.md)$")
_RESULT_LINK = re.compile(r"\]\((?:\.\./)+benchmarks/results/([\w-]+\.md)")
# A highlighted line of a diff that is removed, and the sign in front of one that is added or stays.
_REMOVED = re.compile(r'<span class="gd">(.*?)</span>\n')
_SIGN = re.compile(
    r'(?<=<span class="gi">)\+|(?<=\n)<span class="w"> </span>|(?<=<code>)<span class="w"> </span>'
)


@cache
def targets() -> dict[str, str]:
    """Where the reference has each public name: its identifier there."""
    pages = (path.read_text() for path in sorted((ROOT / "docs/reference").glob("*.md")))
    identifiers = (
        line[4:].strip() for page in pages for line in page.splitlines() if line.startswith("::: ")
    )
    return {identifier.rpartition(".")[2]: identifier for identifier in identifiers}


def public_name(code: str) -> str | None:
    """Public name that a code span mentions: ``fs.train_step(grad_sync="last")`` mentions ``train_step``."""
    found = _NAME.match(code)
    return found[1] if found and found[1] in targets() else None


def link_names(markdown: str, uri: str) -> str:
    """Page with its first mention of each public name, and each file of measurements, made a link.

    Args:
        markdown: Source of the page.
        uri: Path of the page below docs, such as ``how-to/export.md``.
    """
    folder = posixpath.dirname(uri)
    linked: set[str] = set()

    def link(part: re.Match[str]) -> str:
        code = part["code"]
        if code is None:
            return part[0]
        if result := _RESULT.match(code):
            return f"[`{code}`]({posixpath.relpath(f'results/{result[1]}', folder or '.')})"
        name = public_name(code)
        if name is None or name in linked:
            return part[0]
        linked.add(name)
        return f"[`{code}`][{targets()[name]}]"

    text = _RESULT_LINK.sub(
        lambda found: f"]({posixpath.relpath(f'results/{found[1]}', folder or '.')}", markdown
    )
    return _PARTS.sub(link, text)


def add_summaries(markdown: str) -> str:
    """Index of public names with the first line of each docstring, read without importing anything."""
    import griffe

    package: Any = griffe.load("fsdp_sft", search_paths=[str(ROOT / "src")])

    def add(line: re.Match[str]) -> str:
        docstring = package[targets()[line[1]].removeprefix("fsdp_sft.")].docstring
        return f"{line[0]}: {docstring.value.strip().splitlines()[0]}" if docstring else line[0]

    return re.sub(r"^- `(\w+)`$", add, markdown, flags=re.MULTILINE)


def add_readme(markdown: str) -> str:
    """First page with what README begins with, whose links are seen from docs."""
    readme = (ROOT / "README.md").read_text().partition(README_ENDS)[0]
    for folder, seen in (("docs/", ""), ("benchmarks/", "../benchmarks/")):
        readme = readme.replace(f"]({folder}", f"]({seen}")
    return markdown.replace(README_HERE, readme)


def copied_without_signs(html: str) -> str:
    """Page whose diffs are copied as the new program alone: signs and removed lines cannot be selected."""

    def mark(block: re.Match[str]) -> str:
        code = _SIGN.sub(lambda sign: f'<span class="not-copied">{sign[0]}</span>', block[0])
        return _REMOVED.sub('<span class="gd not-copied">\\1\n</span>', code)

    return re.sub(
        r'<div class="highlight"><pre>(?:(?!</pre>).)*<span class="g[id]">.*?</pre>',
        mark,
        html,
        flags=re.DOTALL,
    )


def on_page_content(html: str, **_: Any) -> str:
    """Change a rendered page."""
    return copied_without_signs(html)


def on_files(files: Any, config: Any) -> Any:
    """Add the files of benchmarks/results."""
    from mkdocs.structure.files import File

    for path in sorted(RESULTS.glob("*.md")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Change the source of a page before it is rendered."""
    if page.file.src_uri == HOME:
        markdown = add_readme(markdown)
    if page.file.src_uri == INDEX:
        markdown = add_summaries(markdown)
    return link_names(markdown, page.file.src_uri)
