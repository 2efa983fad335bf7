"""Predicted seconds of a step beside measured ones, with the planner's constants and with those of a check.

    python -m benchmarks.checks.measured_plan --output benchmarks/results/measured-plan.md

Each run trains a Llama with random weights on the CPU, in processes of its own; before it ``fsdp-sft check``
measures with as many ranks. Without a measurement the planner takes a CPU of no particular kind.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_sft as fs
from benchmarks.tables import publish, table

STEPS = 5


@dataclass(frozen=True)
class Case:
    """A run: the width and number of layers, ranks, rows of a forward, accumulation, tokens of a row."""

    width: int
    layers: int
    ranks: int
    micro: int
    accumulation: int
    length: int

    @property
    def config(self) -> LlamaConfig:
        """The model."""
        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.width * 3,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 64,
            num_key_value_heads=self.width // 64,
            vocab_size=4096,
        )

    def seconds_planned(self, check: dict[str, Any] | None) -> float:
        """What the planner says a step takes, with what was measured or without."""
        plans = fs.plan_run(
            self.config,
            num_gpus=self.ranks,
            seq_length=self.length,
            global_batch_size=self.micro * self.accumulation * self.ranks,
            gpu="cpu",
            measured=check,
            micro_batch_size=self.micro,
            sac_ratio=0,
            compile=False,
            attention_mask=False,
            reshard_after_forward=True,
            grad_sync="each",
            dp_replicate=1,
            cp=1,
        )
        return plans[0].time.total

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.width}, {self.micro} x {self.length} tokens x {self.accumulation}"
        )


CASES = (Case(512, 8, 1, 2, 1, 256), Case(768, 6, 2, 1, 4, 256), Case(1024, 4, 2, 2, 2, 512))


def train(case: Case) -> float:
    """Median seconds of a step, of the slowest rank."""
    context = fs.init_distributed()
    model = LlamaForCausalLM(case.config).train()
    fs.shard_model(model, mesh=fs.build_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(4096, (case.micro, case.length))
    window = [{"input_ids": ids, "labels": ids}] * case.accumulation
    seconds = []
    for _ in range(STEPS + 2):
        start = time.perf_counter()
        fs.train_step(model, window, optimizer, check_labels=False)
        seconds.append(time.perf_counter() - start)
    found = statistics.median(seconds[2:])
    if context.is_main:
        print(f"REPORT {found}", flush=True)
    return found


def started(ranks: int, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def row_of(index: int, folder: Path) -> list[str]:
    case, file = CASES[index], folder / f"{index}.json"
    started(case.ranks, "fsdp_sft", "check", "--json", str(file))
    told = started(case.ranks, "benchmarks.checks.measured_plan", "--train", str(index))
    found = float(told.partition("REPORT ")[2].split()[0])
    before, after = case.seconds_planned(None), case.seconds_planned(json.loads(file.read_text()))
    errors = [f"{seconds:.2f} ({seconds / found - 1:+.0%})" for seconds in (before, after)]
    return [str(case), str(case.ranks), f"{found:.2f}", *errors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--output", type=Path)
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(CASES[args.train])
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [row_of(index, Path(folder)) for index in range(len(CASES))]
    head = ["run", "ranks", "measured s a step", "planned", "planned with --measured"]
    lines = [
        "Llamas with random weights, bfloat16 compute, AdamW, on a CPU whose ranks share two processors: "
        f'seconds of an optimizer step (median of {STEPS}), and what `plan_run` predicts for `gpu="cpu"`, by '
        "its own constants, which are of no particular CPU, and by those of `fsdp-sft check` with as many "
        "ranks.",
        "",
        *table(head, rows),
    ]
    publish("Plans from what was measured", lines, args.output)


if __name__ == "__main__":
    main()
