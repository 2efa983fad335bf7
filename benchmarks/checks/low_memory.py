"""Losses with masters and states of fewer bytes, beside float32 masters with torch's AdamW.

    python -m benchmarks.checks.low_memory --output low-memory.md

The example's tiny model and chats (``examples/``), twice: from random weights at the example's rate, and on
from there at a rate of fine-tuning. The windows are the same for all. torchao's optimizers need torchao; they
run without ``torch.compile``, which would change no more than the last bits of their float32.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, get_cosine_schedule_with_warmup

import fsdp_sft as fs
from benchmarks.tables import publish, table
from examples.tiny_model import make_tiny_model

DATA = Path(__file__).parents[2] / "examples" / "data"
BF16, FLOAT32 = torch.bfloat16, torch.float32
AVERAGED = 20  # last steps
ROWS = 8


@dataclass(frozen=True)
class Way:
    """How parameters and states are kept.

    Attributes:
        name: In the table.
        masters: Their dtype.
        make: The optimizer, of parameters and a rate.
    """

    name: str
    masters: torch.dtype
    make: Callable[[Any, float], torch.optim.Optimizer]


def ways() -> list[Way]:
    """All that can run here; the first is what the others are compared with."""
    found = [
        Way("float32 masters, AdamW", FLOAT32, lambda p, lr: torch.optim.AdamW(p, lr)),
        Way("bfloat16 masters, AdamW", BF16, lambda p, lr: torch.optim.AdamW(p, lr)),
        Way("bfloat16 masters, StochasticAdamW", BF16, lambda p, lr: fs.StochasticAdamW(p, lr)),
        Way(
            "the same, `state_dtype=torch.float32`",
            BF16,
            lambda p, lr: fs.StochasticAdamW(p, lr, state_dtype=FLOAT32),
        ),
    ]
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        return found
    return [
        *found,
        Way("float32 masters, torchao AdamW8bit", FLOAT32, lambda p, lr: AdamW8bit(p, lr, weight_decay=0.01)),
    ]


@dataclass(frozen=True)
class Run:
    """What came of one training.

    Attributes:
        losses: Of each step.
        evaluated: The loss of the test rows.
        moved: Share of the elements of parameters that have changed.
        masters: Bytes a parameter.
        states: Likewise.
        seconds: A step.
    """

    losses: list[float]
    evaluated: float
    moved: float
    masters: float
    states: float
    seconds: float

    @property
    def last(self) -> float:
        """Mean of the last steps."""
        return sum(self.losses[-AVERAGED:]) / AVERAGED


def train(way: Way, base: Path, rate: float, steps: int, export: Path | None = None) -> Run:
    """Train a saved model as the example does."""
    mesh = fs.build_mesh()
    model = fs.load_pretrained(base, mesh=mesh, master_dtype=way.masters)
    tokenizer = AutoTokenizer.from_pretrained(base)
    collate = fs.SFTCollator(tokenizer, max_length=512)
    rows, test_rows = (
        [json.loads(line) for line in (DATA / name).read_text().splitlines()]
        for name in ("chats.jsonl", "chats-test.jsonl")
    )
    sampler = fs.ResumableSampler(rows, seed=0)
    loader = DataLoader(rows, ROWS, sampler=sampler, collate_fn=collate, drop_last=True)  # type: ignore[arg-type]
    optimizer = way.make(model.parameters(), rate)
    scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    before = [_own(parameter).clone() for parameter in model.parameters()]
    losses: list[float] = []
    start = time.perf_counter()
    while len(losses) < steps:
        for window in fs.windows(loader, 1):
            losses.append(fs.train_step(model, window, optimizer, scheduler=scheduler).loss)
            if len(losses) == steps:
                break
    seconds = (time.perf_counter() - start) / steps
    count = sum(parameter.numel() for parameter in model.parameters())
    changed = sum(int((_own(p) != b).sum()) for p, b in zip(model.parameters(), before, strict=True))
    states = sum(_bytes(t) for state in optimizer.state.values() for t in state.values() if t.ndim)
    masters = sum(_bytes(parameter) for parameter in model.parameters())
    evaluated = fs.evaluate(model, DataLoader(test_rows[::4], 28, collate_fn=collate)).loss  # type: ignore[arg-type]
    if export is not None:
        fs.export_hf(model, export, tokenizer=tokenizer)
    return Run(losses, evaluated, changed / count, masters / count, states / count, seconds)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _bytes(tensor: torch.Tensor) -> int:
    """What this rank's part takes, with what is inside of a tensor subclass."""
    own: Any = _own(tensor)
    if hasattr(own, "__tensor_flatten__") and type(own) is not torch.Tensor:
        return sum(_bytes(getattr(own, name)) for name in own.__tensor_flatten__()[0])
    return own.numel() * own.element_size()


def draw(runs: dict[str, dict[str, Run]], picture: Path) -> None:
    """Losses of the second training, averaged over some steps, which differ from batch to batch."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(10, 4), layout="constrained", squeeze=False)
    for axis, (title, by_way) in zip(axes[0], runs.items(), strict=True):
        for index, (name, run) in enumerate(by_way.items()):
            smooth = torch.tensor(run.losses).unfold(0, AVERAGED, 1).mean(1)
            # Three curves lie on the first: it is broad and pale, and their dashes take turns.
            look: dict[str, Any] = {"linestyle": (4 * index, (4, 8)), "linewidth": 2}
            if index < 2:
                look = {"linewidth": 5, "alpha": 0.35} if index == 0 else {"linewidth": 2}
            axis.plot(range(AVERAGED, len(run.losses) + 1), smooth, **look, label=name.replace("`", ""))
        axis.set(title=title, xlabel="optimizer step", ylabel=f"loss, mean of {AVERAGED} steps")
        axis.grid(alpha=0.3)
    legend = figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
    )
    for line in legend.get_lines():
        line.set_linestyle("-")  # a sample is shorter than the pause between two dashes
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rates", type=float, nargs=2, default=[1e-3, 2e-5])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    fs.init_distributed()
    torch.manual_seed(0)
    runs: dict[str, dict[str, Run]] = {}
    with tempfile.TemporaryDirectory() as name, torch.compiler.set_stance("force_eager"):
        base, trained = Path(name) / "base", Path(name) / "trained"
        chats = [json.loads(line) for line in (DATA / "chats.jsonl").read_text().splitlines()]
        make_tiny_model(base, [message["content"] for row in chats for message in row["messages"]])
        for start, rate in zip((base, trained), options.rates, strict=True):
            title = f"from {'random weights' if start is base else 'there'}, rate {rate:g}"
            runs[title] = {}
            for way in ways():
                first = start is base and not runs[title]
                run = train(way, start, rate, options.steps, trained if first else None)
                runs[title][way.name] = run
                print(title, way.name, f"{run.last:.4f} {run.evaluated:.4f} {run.seconds:.3f} s", flush=True)
    lines = [
        "`python -m benchmarks.checks.low_memory`: the example's model and chats, "
        f"{options.steps} steps of {ROWS}",
        "rows in one process on a CPU, bfloat16 compute, warm-up and cosine. Loss: the mean of the last",
        f"{AVERAGED} steps, and that of test rows. Bytes: of masters and states, per parameter, counted from",
        "the tensors. Moved: elements of parameters that ended elsewhere than they began.",
    ]
    head = ["", "loss", "less float32's", "test rows", "moved", "masters", "states"]
    for title, by_way in runs.items():
        expected = next(iter(by_way.values())).last
        rows = [
            [
                name,
                f"{run.last:.4f}",
                f"{run.last - expected:+.4f}",
                f"{run.evaluated:.4f}",
                f"{run.moved:.1%}",
                f"{run.masters:.2f}",
                f"{run.states:.2f}",
            ]
            for name, run in by_way.items()
        ]
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", *table(head, rows)]
    publish("Fewer bytes of masters and states", lines, options.output)
    if options.picture is not None:
        draw(runs, options.picture)


if __name__ == "__main__":
    main()
