"""How much there is: statements by room, public names, docstrings, error classes, arguments."""

import ast
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import fsdp_sft as fs

SOURCE = Path(fs.__file__).parent


def now(arguments: Any, frozen: Any) -> dict[str, Any]:
    """By what is counted; statements are those of the syntax tree, without docstrings."""
    rooms: Counter[str] = Counter()
    most: list[tuple[int, str]] = []
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            rooms[room] += isinstance(node, ast.stmt) and not _is_docstring(node)
            if isinstance(node, ast.FunctionDef):
                own = node.args
                most.append((len([*own.posonlyargs, *own.args, *own.kwonlyargs]), f"{room}.{node.name}"))
    public = [getattr(fs, name) for name in fs.__all__]
    documented = [thing for thing in public if callable(thing) and inspect.getdoc(thing)]
    return {
        "statements": sum(rooms.values()),
        **{f"statements of {room}": number for room, number in rooms.items()},
        "rooms": len(rooms),
        "public names": len(public),
        "public names with a docstring": len(documented),
        "error classes": sum(inspect.isclass(one) and issubclass(one, fs.FsdpSftError) for one in public),
        "most arguments": sorted(most, reverse=True)[:8],
    }


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
