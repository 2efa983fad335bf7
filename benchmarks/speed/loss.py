"""linear_cross_entropy_sum against full logits and what others have in their place: time and peak memory.

    python -m benchmarks.speed.loss                         # T=4096, H=1024, V=32000 in float32 and bfloat16
    python -m benchmarks.speed.loss --cpu-time --threads 1  # where other processes use the machine, too
    python -m benchmarks.speed.loss --peers                 # V=32000 and 152064, the head trained and frozen
    python -m benchmarks.speed.loss --gpu                   # T=16384, H=4096, V=152064 in bfloat16, on CUDA

Beside torch's own chunked form there are, where they can be imported, TRL's fused head (``trl.kernels``),
cut-cross-entropy's torch implementation (compiled, which holds the logits), and on CUDA Liger. TRL and
cut-cross-entropy need nothing else: ``pip install --no-deps --target FOLDER "trl==1.16.*" cut-cross-entropy``
and ``PYTHONPATH=FOLDER``.

Every round runs all of them, forward and backward of the sum, in an order that turns. Ratios are medians over
rounds, each to the logits of its round. The peak is what forward and backward allocate beyond their inputs,
gradients included: the high-water mark of resident memory (Linux) or of CUDA's allocator. The error is of
the loss, relative to float64 logits of the same inputs. The three matrix products alone show how much of the
time no exact loss can avoid.
"""

import argparse
import gc
import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import fsdp_sft as fs
from benchmarks.tables import median_and_range, publish, table

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BASE, OURS, FLOOR = "logits + cross entropy", "linear_cross_entropy_sum", "the three products alone"


def full_logits(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, labels, reduction="sum")


def torch_chunked(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


@torch.no_grad()
def products_alone(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What no exact loss can do without: the logits and the wanted gradients, made of as many numbers."""
    logits = hidden @ weight.T
    total = (logits @ weight).sum()
    return total + (logits.T @ hidden).sum() if weight.requires_grad else total


def without_its_init(name: str) -> None:
    """Make a package's modules importable without its ``__init__``, which imports more than they need."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"{name} is not installed")
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[name] = package


def trl_fused(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """TRL's fused head, called as its trainers call it where there is no Triton: every row is scored."""
    without_its_init("trl")
    if "trl.trainer" not in sys.modules:  # whose context gathers what DeepSpeed has sharded: nothing here
        utils: Any = types.ModuleType("trl.trainer.utils")
        utils.maybe_gather_lm_head_ctx = lambda *_: nullcontext()
        sys.modules |= {"trl.trainer": types.ModuleType("trl.trainer"), "trl.trainer.utils": utils}
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    options = (1.0, 32768, None, 1.0, ())  # temperature, chunk of the vocabulary, cap, scale, what else
    scores, *_ = ChunkedLogProbFunction.apply(hidden, weight, None, labels.clamp(min=0), *options)
    return -scores.masked_fill(labels == -100, 0).sum()


def cut_by_torch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    without_its_init("cut_cross_entropy")
    from cut_cross_entropy.torch_compile import torch_compile_linear_cross_entropy

    return torch_compile_linear_cross_entropy(hidden, weight, labels, reduction="sum")


def is_there(loss: Loss) -> bool:
    """Whether what a loss is made of can be imported and run on a few numbers."""
    hidden, weight = torch.ones(2, 4, requires_grad=True), torch.ones(8, 4)
    try:
        loss(hidden, weight, torch.tensor([1, 2])).backward()
    except (ImportError, RuntimeError) as error:
        print(f"left out: {loss.__name__}: {str(error).splitlines()[0]}")
        return False
    return True


def contestants(device: torch.device) -> dict[str, Loss]:
    found: dict[str, Loss] = {
        BASE: full_logits,
        OURS: fs.linear_cross_entropy_sum,
        FLOOR: products_alone,
    }
    if hasattr(F, "linear_cross_entropy"):
        found["F.linear_cross_entropy, chunked"] = torch_chunked
    peers = {"TRL's fused head": trl_fused, "cut-cross-entropy, torch": cut_by_torch}
    found |= {name: loss for name, loss in peers.items() if is_there(loss)}
    if device.type == "cuda":
        try:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        except ImportError:
            return found
        for name, accumulate in (("Liger", None), ("Liger, float32 accumulation", torch.float32)):
            fused = LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=accumulate)
            found[name] = lambda hidden, weight, labels, fused=fused: fused(weight, hidden, labels)
    return found


class PeakMemory:
    """Bytes above the start, at most, while the ``with`` block ran."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
            self.start = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = (torch.cuda.max_memory_allocated() if self.cuda else _status("VmHWM")) - self.start


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def run(
    loss: Loss,
    inputs: tuple[torch.Tensor, ...],
    device: torch.device,
    clock: Callable[[], float],
    frozen: bool = False,
) -> tuple[float, int, float]:
    """Seconds, peak bytes and the loss of one forward and backward."""
    hidden, weight = (tensor.detach().requires_grad_() for tensor in inputs[:2])
    weight.requires_grad_(not frozen)
    with PeakMemory(device) as memory:
        start = clock()
        total = loss(hidden, weight, inputs[2])
        if total.requires_grad:
            total.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = clock() - start
    return seconds, memory.bytes, float(total.detach())


def compare(
    args: argparse.Namespace, dtype: torch.dtype, device: torch.device, vocab: int, frozen: bool
) -> list[list[str]]:
    generator = torch.Generator().manual_seed(0)
    draw = (torch.randn(n, args.hidden, generator=generator) for n in (args.tokens, vocab))
    hidden, weight = (t.to(device, dtype) for t in draw)
    weight *= args.hidden**-0.5
    labels = torch.randint(vocab, (args.tokens,), generator=generator).to(device)
    labels[torch.rand(args.tokens, generator=generator).to(device) >= args.targets] = -100
    inputs = (hidden, weight, labels)
    exact = sum(
        float(F.cross_entropy(rows.double() @ weight.double().T, target, reduction="sum"))
        for rows, target in zip(hidden.split(512), labels.split(512), strict=True)
    )
    losses = contestants(device)
    clock = time.process_time if args.cpu_time else time.perf_counter
    results: dict[str, list[tuple[float, int, float]]] = {name: [] for name in losses}
    few = (hidden[:512], weight, labels[:512])
    torch.compiler.reset()  # a function compiles a few kinds of inputs at most
    for loss in losses.values():  # compiles, allocates, starts threads
        run(loss, few, device, clock, frozen)
    for turn in range(args.rounds):
        names = list(losses)[turn % len(losses) :] + list(losses)[: turn % len(losses)]
        for name in names:
            results[name].append(run(losses[name], inputs, device, clock, frozen))
    base = results[BASE]
    lines: list[list[str]] = []
    for name, rows in results.items():
        seconds, peaks, values = zip(*rows, strict=True)
        ratios = [row[0] / other[0] for row, other in zip(rows, base, strict=True)]
        memory = statistics.median(row[1] / other[1] for row, other in zip(rows, base, strict=True))
        error = "" if name == FLOOR else f"{abs(values[0] - exact) / exact:.1e}"
        taken = [f"{statistics.median(seconds):.3f}", median_and_range(ratios, 3)]
        room = [f"{statistics.median(peaks) / 2**20:,.0f}", f"{memory:.3f}"]
        what = [str(dtype).removeprefix("torch."), f"{vocab:,}", "frozen" if frozen else "trained"]
        lines.append([*what, name, *taken, *room, error])
        print(*lines[-1], sep=" | ", flush=True)
    return lines


def parser_of_shapes(description: str | None, dtypes: Sequence[str]) -> argparse.ArgumentParser:
    """Options of a benchmark of losses: the shape, the dtypes, and how it is timed."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="a CUDA device, and its shape")
    for name in ("tokens", "hidden", "vocab"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtypes", nargs="+", choices=dtypes)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor, not of the clock")
    parser.add_argument("--output", type=Path, help="also write the table there")
    return parser


def device_and_name(args: argparse.Namespace) -> tuple[torch.device, str]:
    """Where it runs, and how that is called; fills in the shape and the dtypes that were not given."""
    shape = (16384, 4096, 152064) if args.gpu else (4096, 1024, 32000)
    for name, default in zip(("tokens", "hidden", "vocab"), shape, strict=True):
        setattr(args, name, getattr(args, name) or default)
    args.dtypes = args.dtypes or (["bfloat16"] if args.gpu else ["float32", "bfloat16"])
    torch.set_num_threads(args.threads)
    where = torch.cuda.get_device_name() if args.gpu else f"CPU, {args.threads} threads"
    return torch.device("cuda" if args.gpu else "cpu"), where


def main() -> None:
    parser = parser_of_shapes(__doc__, ("float32", "bfloat16", "float16"))
    parser.add_argument("--targets", type=float, default=1.0, help="share of rows that are targets")
    parser.add_argument("--peers", action="store_true", help="two vocabularies, the head trained and frozen")
    args = parser.parse_args()
    device, where = device_and_name(args)
    lines = [
        f"T={args.tokens}, H={args.hidden}, {args.targets:.0%} of the rows are targets, "
        f"{where}, {args.rounds} rounds, torch {torch.__version__}",
        "",
    ]
    head = ["dtype", "V", "head", "loss", f"{'CPU ' if args.cpu_time else ''}seconds", "ratio (min to max)"]
    rows: list[list[str]] = []
    for dtype in args.dtypes:
        for vocab in (32000, 152064) if args.peers else (args.vocab,):
            for frozen in (False, True) if args.peers else (False,):
                rows += compare(args, getattr(torch, dtype), device, vocab, frozen)
    lines += table([*head, "peak MiB", "ratio", "loss error"], rows)
    publish("The loss without logits", lines, args.output)


if __name__ == "__main__":
    main()
