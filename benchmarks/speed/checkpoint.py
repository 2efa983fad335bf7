"""Checkpoints against the disk itself and against torch's own ways: time, memory, how long training waits.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.speed.checkpoint --out RESULTS.md

``--only save load export async memory`` picks parts. Everything is on the CPU, with a warm cache.
Ways are timed in turn, the slowest rank counts, and the median over rounds is printed, with the median (and
quartiles) of the ratio within a round. ``raw`` writes the same bytes from the same memory with the same
writers and fsyncs them, or reads the same files into warm memory and hashes them, one piece after the other.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp_sft as fs
from benchmarks.host_memory import PeakMemory
from benchmarks.tables import quartiles, table
from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft._tensors.safetensors import bytes_of

PIECE = 16 << 20
MIB = 1 << 20
Ways = dict[str, Callable[[], Any]]


def config(layers: int, hidden: int) -> Any:
    """A llama of about 12 * hidden^2 parameters a layer."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=4000,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        tie_word_embeddings=False,
    )


def make(layers: int, hidden: int) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded float32 model and an AdamW that has stepped."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(config(layers, hidden))
    fs.shard_model(model, mesh=fs.build_mesh(device_type="cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def locals_of(model: Any, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """This rank's shards of everything that is saved."""
    found = [parameter.detach().to_local() for parameter in model.parameters()]
    for state in optimizer.state.values() if optimizer is not None else ():
        found += [t.to_local() if hasattr(t, "to_local") else t for t in state.values()]
    return found


def is_main() -> bool:
    return dist.get_rank() == 0


def slowest(seconds: float) -> float:
    """Of all ranks."""
    return max(all_gather_objects(seconds))


def timed(way: Callable[[], Any]) -> float:
    dist.barrier()
    started = time.perf_counter()
    way()
    return slowest(time.perf_counter() - started)


def alternate(
    ways: Ways, rounds: int, *, between: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each way in each round; a round before the first is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            between()
            took = timed(way)
            if number:
                seconds[name].append(took)
    return seconds


def lines(seconds: dict[str, list[float]], num_bytes: int, raw: str) -> list[list[str]]:
    """A row for each way: median, speed, and how it compares with ``raw``."""
    rows = []
    for name, took in seconds.items():
        ratios = [a / b for a, b in zip(seconds[raw], took, strict=True)]
        median = statistics.median(took)
        speed = [f"{median:.2f}", f"{num_bytes / median / 1e6:.0f}", f"{statistics.median(ratios):.2f}"]
        rows.append([name, *speed, quartiles(ratios)])
    return rows


def section(title: str, note: str, head: list[str], rows: list[list[str]]) -> str:
    return f"## {title}\n\n{note}\n\n" + "\n".join(table(head, rows)) + "\n"


SPEED = ["way", "seconds", "MB/s", "speed relative to raw", "quartiles"]


class Raw:
    """The same bytes without a checkpoint around them."""

    def __init__(self, folder: Path, tensors: list[torch.Tensor]) -> None:
        self.path = folder / f"raw-{dist.get_rank()}"
        self.views = [bytes_of(tensor.reshape(-1)) for tensor in tensors]
        self.num_bytes = sum(len(view) for view in self.views)

    def write(self) -> None:
        """As one file, piece by piece."""
        fd = os.open(self.path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        at = 0
        for view in self.views:
            for first in range(0, len(view), PIECE):
                at += os.pwrite(fd, view[first : first + PIECE], at)
        os.fsync(fd)
        os.close(fd)

    def write_and_hash(self) -> None:
        """The same, with a SHA-256 of it made meanwhile in a thread."""
        hashed = hashlib.sha256()
        thread = threading.Thread(target=lambda: [hashed.update(view) for view in self.views])
        thread.start()
        self.write()
        thread.join()

    def read_and_hash(self) -> None:
        """Into memory of the size of the state, as a load has it."""
        fd = os.open(self.path, os.O_RDONLY)
        hashed, at = hashlib.sha256(), 0
        for view in self.views:
            for first in range(0, len(view), PIECE):
                piece = view[first : first + PIECE]
                at += os.preadv(fd, [piece], at)
                hashed.update(piece)
        os.close(fd)


def save(args: argparse.Namespace, root: Path) -> str:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = make(args.layers, args.hidden)
    raw = Raw(root, locals_of(model, optimizer))
    steps = iter(range(10_000))

    def ours() -> None:
        fs.save_checkpoint(root / "ours", next(steps), model=model, optimizer=optimizer, keep_last=None)

    def with_dcp() -> None:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=root / "dcp")

    def clean() -> None:
        if is_main():
            for folder in ("ours", "dcp"):
                shutil.rmtree(root / folder, ignore_errors=True)
            for path in root.glob("raw-*"):
                path.unlink()
        dist.barrier()

    ways = {
        "raw write + fsync": raw.write,
        "raw write + fsync, SHA-256 in a thread": raw.write_and_hash,
        "save_checkpoint": ours,
        "dcp.save (no checksums)": with_dcp,
    }
    seconds = alternate(ways, args.rounds, between=clean)
    total = sum(all_gather_objects(raw.num_bytes))
    note = f"Model and AdamW, {total / 1e6:.0f} MB over {dist.get_world_size()} ranks; ours has checksums."
    return section("Saving", note, SPEED, lines(seconds, total, "raw write + fsync"))


def load(args: argparse.Namespace, root: Path) -> str:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = make(args.layers, args.hidden)
    raw = Raw(root, locals_of(model, optimizer))
    raw.write()
    fs.save_checkpoint(root / "ours", 1, model=model, optimizer=optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=root / "dcp")

    def with_dcp() -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=root / "dcp")
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    ways: Ways = {
        "raw read + hash": raw.read_and_hash,
        "load_checkpoint": lambda: fs.load_checkpoint(root / "ours", model=model, optimizer=optimizer),
        "load_checkpoint(verify=False)": lambda: fs.load_checkpoint(
            root / "ours", model=model, optimizer=optimizer, verify=False
        ),
        "dcp.load (no checksums)": with_dcp,
    }
    seconds = alternate(ways, args.rounds)
    total = sum(all_gather_objects(raw.num_bytes))
    note = f"The same state, {total / 1e6:.0f} MB, into the memory that it has."
    return section("Loading", note, SPEED, lines(seconds, total, "raw read + hash"))


def export(args: argparse.Namespace, root: Path) -> str:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model, _ = make(args.layers, args.hidden)
    half = [tensor.bfloat16() for tensor in locals_of(model, None)]
    raw = Raw(root, half)

    def clean() -> None:
        if is_main():
            for path in root.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()

    def with_torch() -> None:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if is_main():
            torch.save({name: tensor.bfloat16() for name, tensor in state.items()}, root / "torch.pt")

    def full(name: str) -> Callable[[], None]:
        return lambda: fs.save_full_state_dict(model, root / name, dtype=torch.bfloat16)

    ways: Ways = {
        "raw write + fsync": raw.write,
        "export_hf": lambda: fs.export_hf(model, root / "out"),
        "save_full_state_dict .safetensors": full("model.safetensors"),
        "get_model_state_dict + torch.save (no fsync)": with_torch,
    }
    seconds = alternate(ways, args.rounds, between=clean)
    total = sum(all_gather_objects(raw.num_bytes))
    note = f"The model in bfloat16, {total / 1e6:.0f} MB; raw: by both ranks, from memory in bfloat16."
    return section("Exporting", note, SPEED, lines(seconds, total, "raw write + fsync"))


def asynchronous(args: argparse.Namespace, root: Path) -> str:
    model, optimizer = make(args.layers, args.hidden)
    sync, blocked = [], []
    for step in range(args.rounds + 1):
        saved = fs.save_checkpoint(root, 2 * step, model=model, optimizer=optimizer, keep_last=1)
        sync.append(slowest(saved.blocked_seconds))
        saved = fs.save_checkpoint(
            root, 2 * step + 1, model=model, optimizer=optimizer, keep_last=1, async_=True
        )
        blocked.append(slowest(saved.blocked_seconds))
        saved.wait()
    share = statistics.median(b / s for b, s in zip(blocked[1:], sync[1:], strict=True))
    rows = [
        ["synchronous", f"{statistics.median(sync[1:]):.3f}"],
        ["asynchronous, the first", f"{blocked[0]:.3f}", f"{blocked[0] / sync[0]:.1%}"],
        ["asynchronous, from the second on", f"{statistics.median(blocked[1:]):.3f}", f"{share:.1%}"],
    ]
    return section(
        "Waiting for a save", "How long training stands still.", ["save", "seconds", "of it"], rows
    )


def memory(args: argparse.Namespace, root: Path) -> str:
    rows = []
    for layers in (args.layers, 2 * args.layers):
        model, optimizer = make(layers, args.hidden)
        largest = max(parameter.numel() * 4 for parameter in model.parameters())
        size = sum(parameter.numel() * 4 for parameter in model.parameters())
        _actions(model, optimizer, root / f"warm-{layers}", lambda name, action: action())
        measured: dict[str, int] = {}
        _actions(model, optimizer, root / str(layers), partial(_note_growth, measured))
        rows += [
            [f"{size / 1e6:.0f}", name, f"{grown / MIB:.0f}", f"{grown / largest:.2f}"]
            for name, grown in measured.items()
        ]
    note = (
        f"Growth of anonymous memory over the state, worst rank. The largest tensor: {largest / MIB:.0f} MiB."
    )
    return section("Memory", note, ["model MB", "what", "MiB", "largest tensors"], rows)


def _actions(model: Any, optimizer: Any, root: Path, run: Callable[[str, Callable[[], Any]], Any]) -> None:
    file = root / "model.safetensors"
    run("save_checkpoint", lambda: fs.save_checkpoint(root, 1, model=model, optimizer=optimizer))
    run("load_checkpoint", lambda: fs.load_checkpoint(root, model=model, optimizer=optimizer))
    run("export_hf", lambda: fs.export_hf(model, root / "out"))
    run("export_hf(dtype=None)", lambda: fs.export_hf(model, root / "same", dtype=None))
    run("save_full_state_dict .safetensors", lambda: fs.save_full_state_dict(model, file))
    run("load_full_state_dict .safetensors", lambda: fs.load_full_state_dict(model, file))


def _note_growth(measured: dict[str, int], name: str, action: Callable[[], Any]) -> None:
    with PeakMemory(0.001) as memory:
        action()
    measured[name] = max(all_gather_objects(memory.grown))


PARTS = {
    "save": save,
    "load": load,
    "export": export,
    "async": asynchronous,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder otherwise")
    parser.add_argument("--out", type=Path, help="write the report here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    fs.init_distributed(device_type="cpu")
    name = tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder) if is_main() else None
    root = Path(all_gather_objects(name)[0])
    texts = [f"# Checkpoints\n\n{dist.get_world_size()} gloo ranks on the CPU, torch {torch.__version__}.\n"]
    try:
        for part in args.only:
            if is_main():
                (root / part).mkdir()
            dist.barrier()
            texts.append(PARTS[part](args, root / part))
            dist.barrier()
            if is_main():
                print(texts[-1], flush=True)
                shutil.rmtree(root / part)
    finally:
        if is_main():
            shutil.rmtree(root, ignore_errors=True)
    if args.out and is_main():
        args.out.write_text("\n".join(texts))
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
