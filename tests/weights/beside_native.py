"""Every causal LM that transformers has, loaded into float32 shards: by this library, by transformers itself.

    python -m tests.weights.beside_native --ranks 2 3 4     # needs accelerate, as the native loading does

A tiny bf16 checkpoint of each class is written by ``save_pretrained``. Each way loads it on gloo ranks, and
every parameter and buffer is compared bit for bit with plain ``from_pretrained(dtype=torch.float32)``:

- ours: ``build_meta_model``, ``shard_model``, ``load_weights``;
- native: ``from_pretrained(..., dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=N))``.

Each class gets a process group of its own, so that what one load leaves behind does not meet the next; ranks
that show no progress are ended, and the class counts as hung.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.architectures import class_names, quiet, save_all
from tests.harness.hf_folders import plain, state_of

WAYS = ("ours", "native")
_COLLECTIVE_SECONDS = 30  # of the process group of one class
_STALL_SECONDS = 90  # without a class being finished


def ours(folder: Path) -> Any:
    model = fs.build_meta_model(folder)
    # In float32: buffers have the dtype that is computed in.
    fs.shard_model(model, mesh=fs.build_mesh(device_type="cpu"), mp_policy=MixedPrecisionPolicy())
    fs.load_weights(model, folder)
    return model


def native(folder: Path) -> Any:
    import transformers
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=dist.get_world_size())
    cls = getattr(transformers, folder.name)
    return cls.from_pretrained(folder, dtype=torch.float32, distributed_config=config)


def problems(model: Any, oracle: Any) -> list[str]:
    """Which parameters and buffers are not bit for bit the oracle's."""
    mine, theirs = state_of(model), state_of(oracle)
    found = [f"only one has {name}" for name in sorted(mine.keys() ^ theirs.keys())]
    for name in sorted(mine.keys() & theirs.keys()):
        a, b = mine[name], theirs[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            found.append(f"{name}: {tuple(a.shape)} {a.dtype}, not {tuple(b.shape)} {b.dtype}")
        elif a.is_meta or not torch.equal(a.contiguous().view(-1).cpu(), b.contiguous().view(-1)):
            same = not a.is_meta and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
            found += [] if same else [f"{name}: values differ"]
    return found


def check_one(way: str, folder: Path) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    try:
        model = ours(folder) if way == "ours" else native(folder)
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        wrong = problems(model, plain(folder))
        return {"kind": "wrong values" if wrong else "bitwise", "detail": wrong[:2], "sharded": sharded}
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        return {"kind": "error", "detail": [f"{type(error).__name__}: {text[:160]}"], "sharded": False}


@quiet()
def work(way: str, folder: Path, out: Path, names: list[str]) -> None:
    """What one rank does under torchrun: each class in turn, its outcome in a file."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in names:
        store = dist.FileStore(str(out / f"{name}.store"), world)
        limit = timedelta(seconds=_COLLECTIVE_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        outcome = check_one(way, folder / name)
        dist.destroy_process_group()  # a rank that waits for one that raised is released by this
        part = out / f"{name}.{rank}.part"
        part.write_text(json.dumps(outcome))
        part.rename(out / f"{name}.{rank}.json")


def launch(way: str, world: int, folder: Path, out: Path, names: list[str]) -> None:
    """Run ``work`` on ranks until all classes have an outcome, or did not come to one on their own either."""
    out.mkdir(parents=True)
    left, tried = list(names), set[str]()
    while left:
        for path in out.glob("*.store"):
            path.unlink()
        (out / "names.json").write_text(json.dumps(left))
        script = ["-m", "tests.weights.beside_native", "--worker", way]
        script += ["--folder", str(folder), "--out", str(out)]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(world), *script]
        with (out / "log").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            while process.poll() is None and time.time() - _last_change(out) < _STALL_SECONDS:
                time.sleep(0.2)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        left = [name for name in left if len(_read(out, name)) < world]
        # What the class before left behind may have ended the ranks, so the first one gets a second try.
        if left and left[0] in tried:
            left.pop(0)
        tried.update(left[:1])


def _last_change(out: Path) -> float:
    return max(path.stat().st_mtime for path in [*out.glob("*.json")])


def _read(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(out.glob(f"{name}.*.json"))]


def verdict(outcomes: list[dict[str, Any]], world: int) -> tuple[str, str]:
    """(kind, detail) of one class over its ranks; an error outweighs wrong values, these outweigh success."""
    if len(outcomes) < world:
        return "hung or died", f"{len(outcomes)} of {world} ranks came to an end"
    for kind in ("error", "wrong values"):
        details = [outcome["detail"] for outcome in outcomes if outcome["kind"] == kind]
        if details:
            # The rank that lost its peer does not say what was wrong.
            own = [d for d in details if "onnection" not in d[0] and "imed out" not in d[0]]
            return kind, "; ".join((own or details)[0])
    return ("bitwise", "") if outcomes[0]["sharded"] else ("bitwise, not sharded", "")


def show(way: str, world: int, verdicts: dict[str, tuple[str, str]]) -> None:
    kinds = Counter(kind for kind, _ in verdicts.values())
    right = kinds["bitwise"] + kinds["bitwise, not sharded"]
    rest = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if not kind.startswith("bitwise"))
    unsharded = kinds["bitwise, not sharded"]
    note = f" ({unsharded} of them left unsharded)" if unsharded else ""
    print(
        f"{world} ranks, {way}: {right} of {len(verdicts)} bitwise{note}; {rest or 'none otherwise'}",
        flush=True,
    )
    for name, (kind, detail) in verdicts.items():
        if not kind.startswith("bitwise"):
            print(f"    {name}: {kind}: {detail}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--classes", nargs="+", help="only these")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        names = json.loads((options.out / "names.json").read_text())
        work(options.worker, options.folder, options.out, names)
        return
    with quiet(), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoints"
        asked = options.classes or class_names()
        failed = save_all(folder, asked)
        names = [name for name in asked if name not in failed]
        print(f"{len(asked)} classes, {len(names)} that plain transformers builds, saves and loads")
        for name, reason in failed.items():
            print(f"    {name}: {reason}", flush=True)
        for world in options.ranks:
            for way in options.ways:
                out = Path(temporary) / f"{way}-{world}"
                launch(way, world, folder, out, names)
                show(way, world, {name: verdict(_read(out, name), world) for name in names})


if __name__ == "__main__":
    main()
