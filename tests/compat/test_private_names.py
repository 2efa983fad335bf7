"""Every private name that the room `_compat` uses is in the versions at hand, or fails by name."""

import ast
import functools
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fsdp_sft
from fsdp_sft import _compat

FILES = sorted((Path(fsdp_sft.__file__).parent / "_compat").glob("*.py"))
FOREIGN = {"torch", "transformers"}
NAME = re.compile(r"_(?!_|fsdp_sft_)\w*[a-z]\w*")
# Of a namedtuple; parts of names put together, which PRIVATE has in full; of torch before 2.15 alone.
OTHERS = {"_replace", "_hooks", "_global_", "_orig_dtype"}


def _imported(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that is imported by name from torch or transformers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in FOREIGN:
            yield from ((node.module, alias.name) for alias in node.names)


def _attributes(source: str) -> set[str]:
    """The private attributes that are read or set, by a dot or as a string; docstrings do not count."""
    nodes = list(ast.walk(ast.parse(source)))
    said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "sys"):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            found.add(node.value)
    return {name for name in found if NAME.fullmatch(name)} - OTHERS - own


@functools.cache
def _names_in(owner: Any) -> set[Any]:
    """The attributes of a class or module, and all that its functions name: attributes of instances, say."""
    made = [
        value
        for kind in getattr(owner, "__mro__", (owner,))
        for value in getattr(kind, "__dict__", {}).values()
    ]
    codes = [value.__code__ for value in made if hasattr(value, "__code__")]
    return {*dir(owner), *(name for code in codes for name in (*code.co_names, *code.co_consts))}


@pytest.mark.parametrize("file", [path for path in FILES if path.name != "__init__.py"], ids=lambda p: p.name)
def test_what_a_file_imports_is_there_and_its_attributes_are_listed(file: Path) -> None:
    source = file.read_text()
    imported = list(_imported(source))
    for module, name in imported:
        owner = importlib.import_module(module)
        is_module = importlib.util.find_spec(f"{module}.{name}") if hasattr(owner, "__path__") else None
        assert hasattr(owner, name) or is_module, f"{module} has no {name}"
    known = {name for names in _compat.PRIVATE.values() for name in names.split()}
    unlisted = _attributes(source) - known - {name for _, name in imported} - {"_C"}
    assert not unlisted, f"say in _compat.PRIVATE where these attributes are: {sorted(unlisted)}"


def test_every_listed_attribute_is_there_and_used() -> None:
    used = set().union(*(re.findall(r"\w+", path.read_text()) for path in FILES if path.stem != "__init__"))
    kinds = {f"_{of}{kind}_hooks" for of in ("", "global_") for kind in ("forward", "backward")}
    kinds |= {name.replace("_hooks", "_pre_hooks") for name in kinds}
    for place, names in _compat.PRIVATE.items():
        assert set(names.split()) <= used | kinds, f"{place}: drop what is not used any more"
        module, _, path = place.partition(":")
        if module == "datasets" and importlib.util.find_spec(module) is None:
            continue  # an extra, of which there may be none
        owner: Any = importlib.import_module(module)
        for name in path.split(".") if path else ():
            owner = getattr(owner, name, None)
        assert set(names.split()) <= _names_in(owner), place
