"""How soon an error of one rank is raised on all, by kind of call.

    python -m benchmarks.checks.errors_reach [--ranks 24] [--output FILE]

Real gloo ranks of a tiny model on this machine, one of which does what the row says. Seconds from the moment
at which the last rank begins the call to the one at which the last rank has raised.
"""

import argparse
import errno
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fsdp_sft as fs
from benchmarks.tables import publish, table
from fsdp_sft._ranks import agree


def _fail(*_: Any) -> Any:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/gone")


def _agreed(bad: bool) -> None:
    with agree.agreed("looking"):
        if bad:
            _fail()


def _batches(good: dict[str, torch.Tensor], bad: bool) -> Any:
    yield good
    yield _fail() if bad else good


def _full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _calls(bad: bool, folder: str) -> dict[str, Callable[[], Any]]:
    """By its name what every rank calls; ``bad`` is the one that does something else."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
    fs.shard_model(model, mesh=fs.build_mesh(device_type="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(12)[None] + 1 + dist.get_rank() % 40
    good = {"input_ids": ids, "labels": ids}
    fs.train_step(model, [good], optimizer)
    root = f"{folder}/root"
    fs.save_checkpoint(root, 1, model=model, optimizer=optimizer)

    def full_disk(background: bool) -> None:
        with mock.patch.object(os, "pwrite", _full if bad else os.pwrite):
            if background:
                fs.save_checkpoint(root, 5, model=model, async_=True).wait()
            else:
                fs.save_checkpoint(root, 5, model=model)

    def step(batches: list[Any]) -> Any:
        return fs.train_step(model, batches, optimizer)

    return {
        "agreed, a block that fails": lambda: _agreed(bad),
        "through_rank_0, a rank that fails": lambda: agree.through_rank_0("x", _fail if bad else list, len),
        "through_rank_0, a decision that fails": lambda: agree.through_rank_0("x", list, _fail),
        "train_step, a bad batch": lambda: step([{**good, "input_ids": ids + 1000 * bad}]),
        "train_step, another number of batches": lambda: step([good] * (1 + bad)),
        "evaluate, a bad batch": lambda: fs.evaluate(model, [{"labels": [1]} if bad else good]),
        "windows, a loader that fails": lambda: list(fs.windows(_batches(good, bad), 1)),
        "save, state that cannot be stored": lambda: fs.save_checkpoint(
            root, 2, model=model, rank_state={"a": object() if bad else 1}
        ),
        "save, another step": lambda: fs.save_checkpoint(root, 3 + bad, model=model),
        "save, a full disk": lambda: full_disk(False),
        "save in the background, a full disk": lambda: full_disk(True),
        "load, a folder that is not there": lambda: fs.load_checkpoint(root + "x" * bad, model=model),
        "save, where the others are in windows": lambda: (
            fs.save_checkpoint(root, 9, model=model) if bad else list(fs.windows([good], 1))
        ),
        "evaluate, where the others are in train_step": lambda: (
            fs.evaluate(model, [good]) if bad else step([good])
        ),
        "a rank that dies": lambda: os._exit(0) if bad else agree.all_reduce_sum([0.0]),
    }


def _rank(rank: int, world_size: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    fs.init_distributed(device_type="cpu")
    found: dict[str, tuple[float, float, str]] = {}
    for name, call in _calls(rank == world_size * 2 // 3, folder).items():
        agree.all_reduce_sum([0.0])
        (began, raised), file = (time.time(), ""), Path(folder) / f"found-{rank}"
        file.write_text(json.dumps({**found, name: (began, began, "dies")}))  # what one that dies leaves
        try:
            call()
        except Exception as error:
            raised = type(error).__name__
        found[name] = (began, time.time(), raised)
        file.write_text(json.dumps(found))
    time.sleep(5)  # nobody learns of the one that died by the end of another
    os._exit(0)  # destroying a group waits for all of its ranks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=24)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (options.ranks, port, folder), nprocs=options.ranks, start_method="fork")
        ranks = [json.loads((Path(folder) / f"found-{rank}").read_text()) for rank in range(options.ranks)]
    rows = []
    for name in ranks[0]:
        began, ended, raised = zip(*(rank[name] for rank in ranks), strict=True)
        kinds = sorted({kind or "nothing" for kind in raised})
        rows.append([name, f"{max(ended) - max(began):.2f}", sum(map(bool, raised)), ", ".join(kinds)])
    lines = [f"{options.ranks} ranks on {os.cpu_count()} cores.", ""]
    publish(
        "How soon an error of one rank is raised on all",
        lines + table(["what one rank does", "seconds", "ranks that raised", "error"], rows),
        options.output,
    )


if __name__ == "__main__":
    main()
