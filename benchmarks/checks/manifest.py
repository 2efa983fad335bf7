"""What a checkpoint of a large job costs beside its numbers: bytes, CPU seconds, pauses of training.

    python -m benchmarks.checks.manifest [--output FILE]

Models on the meta device in fake process groups; AdamW's state beside them. Files of shards have a byte each.
Meanwhile a loop in the main thread notes how long it stood still: what holds the GIL. What the process had
before is frozen (``gc.freeze``): a collection of all of it takes 190 ms here, whenever it falls due.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp_sft as fs
from benchmarks.tables import publish, table
from fsdp_sft._model.state import model_tensors
from fsdp_sft._model.view import parameter_names
from fsdp_sft._tensors.disk import FileRecord, write_bytes
from fsdp_sft.dcp_io.manifest import MANIFEST_NAME, Manifest, encode_manifest, read_manifest
from fsdp_sft.dcp_io.optimizer_content import optimizer_content
from fsdp_sft.dcp_io.parts import parts_of, shard_file
from fsdp_sft.dcp_io.retention import prune

RANKS = (64, 1024, 8192)
SIZES = {"70B": (80, 8192, 28672, 64), "405B": (126, 16384, 53248, 128)}
STEPS = 3


def _model(layers: int, hidden: int, inner: int, heads: int) -> tuple[Any, Any]:
    import transformers as tf

    config = tf.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = tf.LlamaForCausalLM(config)
    fs.shard_model(model, mesh=fs.build_mesh(device_type="cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {name: torch.empty_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return model, optimizer


def _manifest(step: int, content: Any, states: Any, info: Any, records: Any) -> Manifest:
    stored, _ = parts_of("model", content.tensors)
    stored_states, _ = parts_of("optimizer", states)
    return Manifest(
        step=step,
        world_size=dist.get_world_size(),
        model=stored,
        ties=content.ties,
        optimizer=stored_states,
        optimizer_info=info,
        metric=None,
        train_state="null",
        settings={},
        files=records,
    )


def _beside(work: Callable[[], Any]) -> tuple[float, float, float]:
    """(CPU seconds of the thread that works, wall seconds, the longest pause of a loop in this one in ms)."""
    spent: list[float] = []

    def run() -> None:
        started = time.thread_time()
        work()
        spent.append(time.thread_time() - started)

    thread = threading.Thread(target=run)
    started = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    thread.join()
    return spent[0], time.perf_counter() - started, 1000 * longest


def measure(size: str, ranks: int) -> dict[str, Any]:
    """In a process of its own: a fake job."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    model, optimizer = _model(*SIZES[size])
    content = model_tensors(model, values=False)
    info, states = optimizer_content([optimizer], parameter_names(model))
    gc.freeze()
    records = {shard_file(rank): FileRecord(1, f"{rank:064x}") for rank in range(ranks)}
    found: dict[str, Any] = {"tensors": len(content.tensors) + len(states)}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for step in range(1, STEPS + 1):
            (root / f"step-{step}" / "shards").mkdir(parents=True)
            for file in records:
                (root / f"step-{step}" / file).write_bytes(b"0")

        def write(step: int = STEPS) -> None:
            path = root / f"step-{step}" / MANIFEST_NAME
            path.unlink(missing_ok=True)
            write_bytes(path, encode_manifest(_manifest(step, content, states, info, records)))

        for step in range(1, STEPS + 1):
            write(step)
        found["manifest"] = (root / "step-3" / MANIFEST_NAME).stat().st_size
        for what, work in (
            ("write", write),
            ("read", lambda: read_manifest(root / "step-3")),
            ("prune", lambda: prune(root, keep_last=STEPS - 1, keep_best=0, just_saved=STEPS)),
        ):
            # The best of five: what else the machine does only adds to a pause. Pruning can be done once.
            runs = [_beside(work) for _ in range(1 if what == "prune" else 5)]
            found[what] = [min(column) for column in zip(*runs, strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "RANKS"))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]))))
        return
    rows = []
    for size in SIZES:
        for ranks in RANKS:
            command = [sys.executable, "-m", "benchmarks.checks.manifest", "--one", size, str(ranks)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            cells = [
                f"{found[what][0]:.3f} s, {found[what][2]:.0f} ms" for what in ("write", "read", "prune")
            ]
            rows.append([size, ranks, found["tensors"], f"{found['manifest'] / 1e6:.2f}", *cells])
    lines = [
        "CPU seconds of the thread that works, and the longest that a loop in the main thread stood still",
        "beside it. Pruning reads three steps and deletes one. Format version 2, at 70B: 7.2 MB at 64 ranks,",
        "106 MB at 1,024; one read 23 s, and as long a pause.",
        "",
        *table(
            ["model", "ranks", "tensors", "manifest, MB", "write", "read", "prune"],
            rows,
        ),
    ]
    publish("Manifests of large jobs", lines, args.output)


if __name__ == "__main__":
    main()
