"""What is public, which way imports point, and that importing starts nothing."""

import ast
import functools
import graphlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

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


def _imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fsdp_sft":
            parts = node.module.split(".")
            found.update([parts[1]] if len(parts) > 1 else [a.name for a in node.names if a.name[:2] != "__"])
        elif isinstance(node, ast.Import):
            found.update(a.name.split(".")[1] for a in node.names if a.name.startswith("fsdp_sft."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
    return found


def _modules() -> dict[str, list[Path]]:
    modules: dict[str, list[Path]] = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts != ("__init__",):
            modules.setdefault(parts[0], []).append(path)
    return modules


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
    for name, paths in _modules().items():
        assert name in storey, f"{name} has no place in the house: add it to STOREYS and ARCHITECTURE.md"
        for other in set().union(*map(_imports, paths)) - {name}:
            assert storey[other] < storey[name], f"{name} imports {other}, which does not lie below it"


def _file_names() -> dict[str, Path]:
    """The files of the package by the names under which they are imported."""
    parts = {path: path.relative_to(SOURCE.parent).with_suffix("").parts for path in SOURCE.rglob("*.py")}
    return {".".join(names).removesuffix(".__init__"): path for path, names in parts.items()}


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Also in the bodies of functions, where Python would not mind."""
    files = _file_names()
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text())
        blocks = (
            n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)
        )
        for_types = {id(node) for block in blocks for node in ast.walk(block)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in files and id(node) not in for_types:
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                graph.setdefault(name, set()).update((named & files.keys()) or {node.module})
    assert len(graph) > 150
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_private_names_of_torch_and_transformers_stay_in_compat() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.parent.name == "_compat":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            top = node.module.split(".")[0]
            if top in ("torch", "transformers", "huggingface_hub", "safetensors"):
                private = [p for p in [*node.module.split("."), *(a.name for a in node.names)] if p[0] == "_"]
                assert not private, f"{path.name}: {private}"


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
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set()
            if any(base.endswith(("Error", "Exception")) for base in bases):
                assert path.name == "errors.py" or node.name in internal, f"{path.name}: {node.name}"
    defined = [n for n, v in vars(fs.errors).items() if isinstance(v, type) and issubclass(v, Exception)]
    for name in defined:
        error = getattr(fs, name)
        assert issubclass(error, fs.FsdpSftError), name
        builtins = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert name == "FsdpSftError" or len(builtins) > 3, f"{name} is no built-in error besides"


def _test_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.split(".")[0] in ("tests", "benchmarks")}


def test_tests_mirror_the_rooms_and_share_only_the_harness() -> None:
    packages = {path.name.strip("_") for path in SOURCE.iterdir() if path.is_dir() and path.name[:2] != "__"}
    rooms = {path.name for path in TESTS.iterdir() if path.is_dir() and path.name[:2] != "__"} - NO_ROOMS
    assert rooms <= packages, f"{sorted(rooms - packages)} are no rooms of the library"
    assert packages - rooms == set(), f"{sorted(packages - rooms)} have no tests"
    for path in TESTS.rglob("*.py"):
        for name in _test_imports(path):
            parts = name.split(".")
            assert parts[0] == "tests", f"{path.name} imports {name}: tests do not need the benchmarks"
            assert not any(part.startswith("test_") for part in parts), f"{path.name} imports {name}"
            assert not parts[-1].startswith("_"), f"{path.name} imports the private name {name}"
    for path in BENCHMARKS.rglob("*.py"):
        for name in _test_imports(path):
            assert not name.startswith("tests"), f"{path.name} imports {name}: benchmarks do not need tests"


def test_every_public_name_is_there_documented_and_typed() -> None:
    assert fs.__all__ == sorted(fs.__all__)
    assert fs.__all__ == dir(fs)
    forwarded = {
        "compile_blocks",
        "build_meta_model",
        "plan_run",  # to the arguments of estimate_memory, likewise:
    }  # to torch.compile, which refuses unknown ones; to the config
    modules = {path.stem for path in SOURCE.glob("*.py")} | {p.name for p in SOURCE.iterdir() if p.is_dir()}
    for name in fs.__all__:
        value = getattr(fs, name)
        if name == "__version__":
            continue
        assert name not in modules, f"{name} carries the name of a module"
        if isinstance(value, type) and issubclass(value, Exception):
            assert value.__doc__, f"{name} has no docstring"
        elif callable(value):
            assert inspect.getdoc(value), f"{name} has no docstring"
            signature = inspect.signature(value)
            rest = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
            # Unpack names each keyword with its type.
            named = all(str(p.annotation).startswith("Unpack[") for p in rest)
            is_open = bool(rest) and not named and not getattr(value, "_is_protocol", False)
            assert not is_open or name in forwarded, name
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        fs.no_such_name  # noqa: B018


def test_the_docstring_maps_what_a_loop_needs() -> None:
    map_of_names = (fs.__doc__ or "").split("\n\n", 2)[2]
    entries = re.findall(r"^    (\w+) {2,}(\S.*)$", map_of_names, re.MULTILINE)
    groups = re.findall(r"^(\w.*)$", map_of_names, re.MULTILINE)
    names = [name for name, _ in entries]
    assert len(entries) + len(groups) == len([line for line in map_of_names.splitlines() if line.strip()])
    assert len(names) == len(set(names))
    assert set(names) <= set(fs.__all__)
    assert 55 <= len(names) <= 68
    assert len(groups) == 8
    assert max(len(phrase) for _, phrase in entries) <= 60
    assert not any(hasattr(getattr(fs, name), "__deprecated__") for name in names)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((SOURCE / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    for node in imports:
        assert all(name.asname == name.name for name in node.names), "without `as` a stub does not re-export"
    assert len(imports) == len({node.module for node in imports}), "each module once"
    assert {name.name for node in imports for name in node.names} | {"__version__"} == set(fs.__all__)


def test_model_first_the_rest_by_keyword() -> None:
    two = {
        *("apply_sac", "estimate_memory", "load_full_state_dict", "save_full_state_dict", "loss_sum"),
        *("causal_lm_loss", "windows", "encode_chat", "encode_dataset", "filter_rows", "evaluate"),
        *("gradient_sync", "export_hf", "save_checkpoint", "plot_run", "pack_lengths", "token_losses"),
        *("select_block_indices", "model_flops_per_token", "load_weights", "add_adapters", "export_adapter"),
    }
    three = {"train_step", "render_labels", "render_labels_html", "linear_cross_entropy_sum"}
    for name in fs.__all__:
        value = getattr(fs, name)
        if not inspect.isfunction(value):
            continue
        positional = [
            p for p in inspect.signature(value).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD
        ]
        assert len(positional) <= (3 if name in three else 2 if name in two else 1), name


def _in_fresh_python(code: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_starts_nothing() -> None:
    report = _in_fresh_python(
        """
import json, logging, os, sys
before = dict(os.environ)
import torch
import fsdp_sft
lazy = sorted(m for m in sys.modules if m.startswith("fsdp_sft."))
for name in fsdp_sft.__all__:
    getattr(fsdp_sft, name)
import torch.distributed as dist
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "transformers", "jinja2.sandbox")
print(json.dumps({
    "lazy": lazy,
    "heavy": [m for m in heavy if m in sys.modules],
    "environment": before == dict(os.environ),
    "handlers": len(logging.getLogger("fsdp_sft").handlers),
    "group": dist.is_initialized(),
    "cuda": torch.cuda.is_initialized(),
}))
"""
    )
    assert report == {
        "lazy": [],
        "heavy": [],
        "environment": True,
        "handlers": 0,
        "group": False,
        "cuda": False,
    }


def test_the_declared_dependencies_are_the_ones_imported() -> None:
    declared = {"torch", "transformers", "safetensors", "huggingface_hub", "filelock", "typing_extensions"}
    allowed = declared | {"fsdp_sft"}
    # tqdm comes with transformers, jinja2 and networkx with torch; the others are extras
    optional = {"tqdm", "jinja2", "networkx", "matplotlib", "peft"}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names | allowed | optional, f"{path.name} imports {name}"


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
    command = [sys.executable, "-c", IMPORT_EACH_FIRST, *sorted(_modules())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
