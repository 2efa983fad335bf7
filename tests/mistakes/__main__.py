"""Well-known mistakes of fine-tuning code, made one at a time in a copy of the library: do the tests notice?

    python -m tests.mistakes
    python -m tests.mistakes --log mistakes.jsonl   # a run that was stopped goes on

Each mistake is a change of one line in a copy of the project, in which the tests beside it are run. One
that leaves them green is reported, and the exit code is the number of such mistakes. Two of them were made in
print: labels that were the attention mask, and a loss divided by the world size under FSDP2.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.places import ROOT
from tests.mistakes import MISTAKES, Mistake


def cannot_be_made(mistake: Mistake) -> str:
    """Why not; "" if it can."""
    text = (ROOT / "src" / "fsdp_sft" / mistake.file).read_text()
    count = text.count(mistake.old)
    if count != 1:
        return f"{mistake.name}: {mistake.file} has its line {count} times; bring the mistake up to date"
    try:
        if mistake.file.endswith(".py"):
            ast.parse(text.replace(mistake.old, mistake.new))
    except SyntaxError as error:
        return f"{mistake.name}: {mistake.file} would be no Python with it ({error})"
    missing = [test for test in mistake.tests if not (ROOT / test.partition("::")[0]).exists()]
    return f"{mistake.name}: no {missing[0]}" if missing else ""


@contextmanager
def made(mistake: Mistake) -> Iterator[tuple[Path, dict[str, str]]]:
    """A copy of the project with the mistake in it; the environment in which that is what is imported."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("__pycache__", ".*", "demo-output", "site"))
        path = copy / "src" / "fsdp_sft" / mistake.file
        path.write_text(path.read_text().replace(mistake.old, mistake.new))
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        where = "import fsdp_sft, pathlib; print(pathlib.Path(fsdp_sft.__file__).parent.parent)"
        found = subprocess.run(
            [sys.executable, "-c", where], env=environment, capture_output=True, text=True, check=True
        )
        assert Path(found.stdout.strip()).samefile(copy / "src"), "the copy is not what is imported"
        yield copy, environment


def noticed_by(mistake: Mistake) -> str:
    """The first test that fails for a mistake; "" if none does. The library has to import with it."""
    if reason := cannot_be_made(mistake):
        raise SystemExit(reason)
    with made(mistake) as (copy, environment):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mistake.tests]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{mistake.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        print(f"{mistake.name}: {failed[0][7:100] if failed else 'NOT NOTICED'}", flush=True)
        return failed[0].split()[1] if done.returncode == 1 else ""


def read_log(path: Path | None) -> dict[str, str]:
    """The test that has noticed a mistake, by the mistakes' names, according to a log; "" for none."""
    if path is None or not path.exists():
        return {}
    return dict(json.loads(line) for line in path.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="mistakes whose name has this in it")
    parser.add_argument("--check", action="store_true", help="only that each line and each test is there")
    parser.add_argument(
        "--log", type=Path, help="mistakes that it has are not made again; the others are added"
    )
    options = parser.parse_args()
    chosen = [mistake for mistake in MISTAKES if (options.only or "") in mistake.name]
    if not chosen:
        parser.error(f"no mistake has {options.only!r} in its name")
    if options.check:
        gone = [reason for mistake in chosen if (reason := cannot_be_made(mistake))]
        raise SystemExit("\n".join(gone) if gone else 0)
    known = read_log(options.log)
    for mistake in chosen:
        if mistake.name not in known:
            known[mistake.name] = noticed_by(mistake)
            if options.log is not None:
                with options.log.open("a") as file:
                    file.write(json.dumps([mistake.name, known[mistake.name]]) + "\n")
    missed = sum(not known[mistake.name] for mistake in chosen)
    print(f"{len(chosen) - missed} of {len(chosen)} mistakes are noticed")
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
