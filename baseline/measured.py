"""What ``figures`` measures in a tree, in fresh processes: ``torchrun ... baseline/measured.py FOLDER``.

It calls nothing but what stays the same through the redesign. The last line that rank 0 prints is JSON.
"""

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_sft as fs


def make(folder: Path) -> None:
    """Write the checkpoint that is loaded, 0.5 GB of bf16."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=8
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")


def main(folder: Path) -> None:
    """Measure, on this rank; rank 0 prints."""
    context = fs.init_distributed()
    mesh = fs.build_mesh()
    found: dict[str, float] = {}
    peak = _Peak()
    with peak:
        found["load_seconds"], model = _timed(lambda: fs.load_pretrained(folder / "model", mesh=mesh))
    found["load_peak_mb"] = peak.grown / 1e6
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    small = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=64, num_attention_heads=2
        )
    )
    fs.shard_model(small, mesh=mesh)
    steps = torch.optim.SGD(small.parameters(), lr=1e-3)
    ids = torch.randint(3, 60, (1, 8))
    batch = {"input_ids": ids, "labels": ids}
    fs.train_step(small, [batch], steps)
    times = [_timed(lambda: fs.train_step(small, [batch], steps))[0] for _ in range(20)]
    found["step_seconds"] = sorted(times)[len(times) // 2]
    fs.train_step(model, [batch], optimizer)
    root = folder / "steps"
    found["save_seconds"], _ = _timed(lambda: fs.save_checkpoint(root, 1, model=model, optimizer=optimizer))
    found["resume_seconds"], _ = _timed(lambda: fs.load_checkpoint(root, model=model, optimizer=optimizer))
    found["export_seconds"], _ = _timed(lambda: fs.export_hf(model, folder / "export"))
    torch.distributed.barrier()
    if context.is_main:
        shutil.rmtree(root)
        shutil.rmtree(folder / "export")
        print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


class _Peak:
    """Growth of this process's anonymous memory in a block, sampled in a thread."""

    def __enter__(self) -> None:
        self._base = self._most = _anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self._most = max(self._most, _anonymous())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        """Bytes of the peak over the start."""
        return self._most - self._base


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    make(Path(sys.argv[2])) if sys.argv[1] == "make" else main(Path(sys.argv[1]))
