"""``python -m baseline``; see the package."""

import argparse
import json
import os
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums depend on the number of threads
from baseline import reads, signatures, tape

FROZEN = Path(__file__).parent / "frozen"
# By part and entries, whose names may have wildcards: why they differ from what is frozen.
MEANT = Path(__file__).parent / "meant.json"
PARTS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module for module in (signatures, reads, tape)
}


def main() -> int:
    """Write or compare; the exit code is the number of differences, at most 100."""
    parser = argparse.ArgumentParser(prog="python -m baseline", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument(
        "--log", type=Path, help="runs of the tape that are not made again; default: .tape/log.jsonl"
    )
    parser.add_argument("--only", default="", help="runs of the tape whose name has this in it")
    arguments = parser.parse_args()
    differing = 0
    for name in arguments.parts or PARTS:
        path = FROZEN / f"{name}.json"
        frozen = json.loads(path.read_text()) if path.exists() and arguments.what == "compare" else None
        if frozen is not None and name == "tape":
            frozen = {key: entry for key, entry in tape.here(frozen, path).items() if arguments.only in key}
        found = PARTS[name].now(arguments, frozen)
        if arguments.what == "write":
            FROZEN.mkdir(exist_ok=True)
            lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(found.items()))
            path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            print(f"{name}: {len(found)} entries in {path}")
        elif frozen is None:
            raise SystemExit(f"nothing is frozen of {name}: python -m baseline write {name}")
        else:
            meant = json.loads(MEANT.read_text()).get(name, {})
            lines = _differences(_without(frozen, meant), _without(found, meant))
            differing += 0 if "*" in meant else len(lines)
            changed = {key for key in frozen.keys() | found.keys() if frozen.get(key) != found.get(key)}
            as_meant = len(changed) - len(changed & {*_without(frozen, meant), *_without(found, meant)})
            new = f"{len(found.keys() - frozen.keys())} new"
            print(f"{name}: {len(frozen)} entries, {as_meant} differ as is meant, {len(lines)} others; {new}")
            print("\n".join(lines))
    return min(differing, 100)


def _without(entries: dict[str, object], left_out: dict[str, str]) -> dict[str, object]:
    return {
        key: value
        for key, value in entries.items()
        if not any(fnmatchcase(key, pattern) for pattern in left_out)
    }


def _differences(frozen: dict[str, object], found: dict[str, object]) -> "list[str]":
    """What differs, a line each; what is new, such as what a new test notes, differs from nothing."""
    gone = [f"  gone: {key}" for key in sorted(frozen.keys() - found.keys())]
    other = [
        f"  {key}\n    was {json.dumps(frozen[key])}\n    is  {json.dumps(found[key])}"
        for key in sorted(frozen.keys() & found.keys())
        if json.dumps(frozen[key]) != json.dumps(found[key])
    ]
    return gone + other


if __name__ == "__main__":
    raise SystemExit(main())
