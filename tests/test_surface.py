"""What is public, which way imports point, and that importing starts nothing."""

import ast
import functools
import graphlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fsdp_sft as fs
import fsdp_sft.errors

SOURCE = Path(fs.__file__).parent

# The ground of the house, then each storey: a module imports from lower storeys only.
STOREYS = [
    "errors",
    "targets",
    "_compat",
    "_process",
    "_ranks",
    "_tensors",
    "_quantised",
    "_model",
    "jobs",
    "metrics",
    "optimizer",
    "attention",
    "experts",
    "sac",
    "shard",
    "dcp_io",
    "weights",
    "collate",
    "sampling",
    "export",
    "loss",
    "planner",
    "step",
    "check",
    "commands",
    "__main__",
]
TESTS = Path(__file__).parent
BENCHMARKS = TESTS.parent / "benchmarks"
# Folders of tests that are no room of the library.
NO_ROOMS = {"compositions", "faults", "harness", "mistakes", "ports", "simulated"}

# A fact, as a pattern of the code that states it, and the files that own it.
OWNERS = {
    "which rank this is": (r"\bdist\.get_(rank|world_size)\(", {"_ranks/agree.py", "_ranks/init.py"}),
    "what a rank holds": (r"\.to_local\(\)", {"_tensors/boxes.py"}),
    "names of tensors": (
        r"named_buffers\(",
        {
            "_compat/conversions.py",
            "_compat/fsdp.py",
            "_compat/models.py",
            "_compat/modules.py",
            "_model/view.py",
        },
    ),
    "generators of every device": (r"fork_rng|[gs]et_rng_state\(", {"_process/generators.py"}),
    "what a temporary folder is called": (r"[\"']\.tmp-", {"_tensors/disk.py"}),
    "how a step's folder is called": (r"[\"']step-", {"dcp_io/manifest.py"}),
    "the label that is not trained": (r"= -100\b", {"targets.py"}),
    "rows of a chunk": (r"def \w*chunk_size", {"loss/linear.py"}),
    "which rank a sampler serves": (r"rank must be in \[0", {"sampling/sampler.py"}),
    "what is on the disk": (r"os\.fsync\(", {"_tensors/safetensors.py"}),
}


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _nodes(*kinds: type[ast.AST]) -> Iterator[tuple[Path, Any]]:
    """Nodes of the library's files, at any depth."""
    for path in SOURCE.rglob("*.py"):
        yield from ((path, node) for node in ast.walk(_tree(path)) if isinstance(node, kinds))


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What an import names, by full names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, "relative import"
    return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]


def _modules() -> set[str]:
    """The rooms, and the modules beside them."""
    return {path.relative_to(SOURCE).with_suffix("").parts[0] for path in SOURCE.rglob("*.py")} - {"__init__"}


@functools.cache
def _code(path: Path) -> str:
    """What a file runs: without comments and docstrings, whose examples show what the facts are."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_imports_point_one_way() -> None:
    storey = {name: i for i, name in enumerate(STOREYS)}
    assert _modules() == set(STOREYS), "a module without a place: add it to STOREYS and ARCHITECTURE.md"
    for path, node in _nodes(ast.Import, ast.ImportFrom):
        own = path.relative_to(SOURCE).with_suffix("").parts[0]
        for name in _imported(node):
            parts = name.split(".")
            if parts[0] == "fsdp_sft" and own in storey and parts[1:2] != [own] and parts[1:]:
                assert storey.get(parts[1], -1) < storey[own], f"{path.name} imports {name}"


def _file_names() -> dict[str, Path]:
    """The files of the package by the names under which they are imported."""
    return {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Also in the bodies of functions, where Python would not mind."""
    files = {path: name for name, path in _file_names().items()}
    graph: dict[str, set[str]] = {}
    for path, name in files.items():
        blocks = [n for n in ast.walk(_tree(path)) if isinstance(n, ast.If)]
        for_types = {
            id(node) for n in blocks if "TYPE_CHECKING" in ast.unparse(n.test) for node in ast.walk(n)
        }
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
                named = {*_imported(node)} & {*files.values()}
                graph.setdefault(name, set()).update((named - {str(node.module)}) or named)
    assert len(graph) > 150
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_private_names_of_torch_and_transformers_stay_in_compat() -> None:
    for path, node in _nodes(ast.ImportFrom):
        names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        if names[0] in ("torch", "transformers", "huggingface_hub", "safetensors"):
            private = [name for name in names if name[0] == "_"]
            assert not private or path.parent.name == "_compat", f"{path.name}: {private}"


def test_each_fact_has_its_owner() -> None:
    for fact, (pattern, owners) in OWNERS.items():
        found = {
            path.relative_to(SOURCE).as_posix()
            for path in SOURCE.rglob("*.py")
            if re.search(pattern, _code(path))
        }
        assert found <= owners, f"{fact}: {sorted(found - owners)} state it too; ask {sorted(owners)}"
        assert found, f"{fact}: the pattern finds nothing any more"


def test_every_error_is_below_one_root_and_exported() -> None:
    # These never leave their rooms: a tensor is converted whole, a loss computed otherwise, a file refused,
    # the checks of a job end.
    internal = {"TemplateRunError", "UntraceableError", "ProbeError", "_RankLostError"}
    for path, node in _nodes(ast.ClassDef):
        if any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases):
            assert path.name == "errors.py" or node.name in internal, f"{path.name}: {node.name}"
    for name in [n for n, v in vars(fs.errors).items() if isinstance(v, type) and issubclass(v, Exception)]:
        error = getattr(fs, name)
        assert issubclass(error, fs.FsdpSftError), name
        assert name == "FsdpSftError" or sum(base.__module__ == "builtins" for base in error.__mro__) > 3, (
            f"{name} is no built-in error besides"
        )


def test_tests_mirror_the_rooms_and_share_only_the_harness() -> None:
    packages = {path.name.strip("_") for path in SOURCE.iterdir() if path.is_dir() and path.name[:2] != "__"}
    rooms = {path.name for path in TESTS.iterdir() if path.is_dir() and path.name[:2] != "__"} - NO_ROOMS
    assert rooms == packages, "rooms without tests, or tests without a room"
    for path in [*TESTS.rglob("*.py"), *BENCHMARKS.rglob("*.py")]:
        for node in ast.walk(_tree(path)):
            for name in _imported(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
                top, _, rest = name.partition(".")
                if top == "tests":
                    assert path.is_relative_to(TESTS), f"{path.name} imports {name}: benchmarks need no tests"
                    assert not [part for part in rest.split(".") if part.startswith("test_")], (
                        f"{path.name} imports {name}"
                    )
                    assert rest.rpartition(".")[2][:1] != "_", f"{path.name} imports the private name {name}"
                assert top != "benchmarks" or path.is_relative_to(BENCHMARKS), f"{path.name} imports {name}"


def test_every_public_name_is_there_documented_and_typed() -> None:
    assert fs.__all__ == sorted(fs.__all__) == dir(fs)
    # To torch.compile, which refuses unknown ones; to the config; to the arguments of estimate_memory.
    forwarded = {"compile_blocks", "build_meta_model", "plan_run"}
    for name in {*fs.__all__} - {"__version__"}:
        value = getattr(fs, name)
        assert name not in _modules(), f"{name} carries the name of a module"
        if not callable(value):
            continue
        assert value.__doc__ if isinstance(value, type) else inspect.getdoc(value), f"{name} has no docstring"
        if isinstance(value, type) and issubclass(value, Exception):
            continue
        parameters = inspect.signature(value).parameters.values()
        # Unpack names each keyword with its type.
        named = all(
            str(p.annotation).startswith("Unpack[")
            for p in parameters
            if p.kind is inspect.Parameter.VAR_KEYWORD
        )
        assert named or getattr(value, "_is_protocol", False) or name in forwarded, name
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        fs.no_such_name  # noqa: B018


def test_the_docstring_maps_what_a_loop_needs() -> None:
    names = re.findall(r"^    (\w+) {2,}\S", (fs.__doc__ or "").split("\n\n", 2)[2], re.MULTILINE)
    assert 55 <= len(names) == len(set(names)) <= 68
    assert set(names) <= set(fs.__all__)


def test_type_checkers_see_the_same_names() -> None:
    imports = [
        node
        for node in ast.parse((SOURCE / "__init__.pyi").read_text()).body
        if isinstance(node, ast.ImportFrom)
    ]
    for node in imports:
        assert all(name.asname == name.name for name in node.names), "without `as` a stub does not re-export"
    assert len(imports) == len({node.module for node in imports}), "each module once"
    assert {name.name for node in imports for name in node.names} | {"__version__"} == set(fs.__all__)


def test_model_first_the_rest_by_keyword() -> None:
    three = {"train_step", "render_labels", "render_labels_html", "linear_cross_entropy_sum"}
    for name in fs.__all__:
        if inspect.isfunction(value := getattr(fs, name)):
            positional = [
                p for p in inspect.signature(value).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD
            ]
            assert len(positional) <= (3 if name in three else 2), name


IMPORT = """
import json, logging, os, sys
before = dict(os.environ)
import torch
import fsdp_sft
lazy = sorted(m for m in sys.modules if m.startswith("fsdp_sft."))
for name in fsdp_sft.__all__:
    getattr(fsdp_sft, name)
import torch.distributed as dist
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "transformers", "jinja2.sandbox")
loaded = [m for m in heavy if m in sys.modules]
started = dist.is_initialized(), torch.cuda.is_initialized()
handlers = len(logging.getLogger("fsdp_sft").handlers)
print(json.dumps([lazy, loaded, before == dict(os.environ), handlers, *started]))
"""


def test_importing_starts_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    lazy, heavy, same_environment, handlers, *started = json.loads(done.stdout.splitlines()[-1])
    assert (lazy, heavy, same_environment, handlers, started) == ([], [], True, 0, [False, False])


def test_the_declared_dependencies_are_the_ones_imported() -> None:
    allowed = {"torch", "transformers", "safetensors", "huggingface_hub", "filelock", "typing_extensions"}
    # tqdm comes with transformers, jinja2 and networkx with torch; the others are extras
    allowed |= {"fsdp_sft", "tqdm", "jinja2", "networkx", "matplotlib", "peft"}
    for path, node in _nodes(ast.Import, ast.ImportFrom):
        tops = {name.split(".")[0] for name in _imported(node)}
        assert tops <= sys.stdlib_module_names | allowed, f"{path.name} imports {tops}"


IMPORT_EACH_FIRST = """
import importlib, os, sys
import torch, torch.distributed.fsdp, torch.distributed.tensor
heavy = {"torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "transformers", "jinja2.sandbox"}
heavy |= {"peft", "matplotlib"}
assert not heavy & set(sys.modules) and not any(name.startswith("fsdp_sft") for name in sys.modules)
failed = []
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        module = importlib.import_module(f"fsdp_sft.{name}")
        loaded = sorted(heavy & set(sys.modules))
        started = torch.distributed.is_initialized() or torch.accelerator.is_available()
        if loaded or started or module.__name__ != f"fsdp_sft.{name}":
            print(name, "imports", loaded, "started" if started else "", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(f"{failed} cannot be imported first, or import what costs time" if failed else 0)
"""


def test_modules_import_on_their_own_and_nothing_heavy() -> None:
    """Each is the first of the package in a process of its own, forked where torch is in."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH_FIRST, *sorted(_modules())],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
