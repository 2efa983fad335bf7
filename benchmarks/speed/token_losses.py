"""Losses of tokens against full logits and the chunked cross entropy: time and peak memory.

    python -m benchmarks.speed.token_losses                         # T=4096, H=1024, V=32000
    python -m benchmarks.speed.token_losses --cpu-time --threads 1  # where other processes use the machine
    python -m benchmarks.speed.token_losses --gpu                   # T=16384, H=4096, V=152064, on CUDA

Each computes the loss of every token from hidden states and the head's weight, and the gradients for a weight
of either sign for each token; the chunked cross entropy has one loss for all. "Frozen" is the gradient of the
hidden states alone. "None" is no gradient at all, as for a reference model, whose time is held against that
of the cross entropy with a trained head. Every round runs all of them in an order that turns; ratios are
medians over rounds. The peak is what a run allocates beyond its inputs, gradients included, as torch's
profiler or CUDA's allocator counts it in a run before. The error is that of the losses, relative to the
largest of float64 logits.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import fsdp_sft as fs
from benchmarks.speed.loss import PeakMemory, device_and_name, parser_of_shapes
from benchmarks.tables import median_and_range, publish, table
from fsdp_sft.loss.linear import head_losses

Tokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
PLAIN, TRL, OURS = "log_softmax and gather", "TRL's selective_log_softmax", "token_losses"
SUM = "chunked cross entropy"
GRADIENTS = {"trained": (True, True), "frozen": (True, False), "none": (False, False)}


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight).float()
    return -F.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0]


def selective(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """TRL's function, or if TRL is not installed, its formula: row by row of a batch of 8."""
    logits, index = F.linear(hidden, weight).unflatten(0, (8, -1)), labels.unflatten(0, (8, -1))
    try:
        from trl.trainer.utils import selective_log_softmax
    except ImportError:
        if logits.dtype in (torch.float32, torch.float64):
            chosen = logits.gather(-1, index[..., None])[..., 0]
            return -(chosen - torch.stack([row.logsumexp(-1) for row in logits])).flatten()
        rows = [
            row.log_softmax(-1).gather(-1, own[:, None])[:, 0] for row, own in zip(logits, index, strict=True)
        ]
        return -torch.stack(rows).flatten()
    return -selective_log_softmax(logits, index).flatten()


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return head_losses(hidden, weight, labels, summed=False)[0]


def run(
    name: str, inputs: tuple[torch.Tensor, ...], wanted: tuple[bool, bool], clock: Callable[[], float]
) -> tuple[float, torch.Tensor]:
    """Seconds and the losses of one forward and backward."""
    hidden, weight = (t.detach().requires_grad_(want) for t, want in zip(inputs, wanted, strict=False))
    labels, factors = inputs[2:]
    functions = {PLAIN: plain, TRL: selective, OURS: ours}
    device = hidden.device
    with torch.set_grad_enabled(any(wanted)):
        start = clock()
        if name == SUM:
            total = fs.linear_cross_entropy_sum(hidden, weight, labels)
            losses = total.detach()
        else:
            losses = functions[name](hidden, weight, labels)
            total = (losses.float() * factors).sum()
        if total.requires_grad:
            total.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = clock() - start
    return seconds, losses.detach()


def peak_of(name: str, inputs: tuple[torch.Tensor, ...], wanted: tuple[bool, bool]) -> int:
    """Bytes that one forward and backward have allocated at once, at most."""
    if inputs[0].is_cuda:
        with PeakMemory(inputs[0].device) as memory:
            run(name, inputs, wanted, time.perf_counter)
        return memory.bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run(name, inputs, wanted, time.perf_counter)
    results = seen.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def compare(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> list[list[str]]:
    generator = torch.Generator().manual_seed(0)
    draw = (torch.randn(n, args.hidden, generator=generator) for n in (args.tokens, args.vocab))
    hidden, weight = (t.to(device, dtype) for t in draw)
    weight *= args.hidden**-0.5
    labels = torch.randint(args.vocab, (args.tokens,), generator=generator).to(device)
    inputs = (hidden, weight, labels, torch.randn(args.tokens, generator=generator).to(device))
    exact = torch.cat(
        [
            F.cross_entropy(rows.double() @ weight.double().T, target, reduction="none")
            for rows, target in zip(hidden.split(512), labels.split(512), strict=True)
        ]
    )
    clock = time.process_time if args.cpu_time else time.perf_counter
    cases = [(name, kind) for kind in GRADIENTS for name in (PLAIN, TRL, SUM, OURS)]
    results: dict[tuple[str, str], list[tuple[float, float]]] = {case: [] for case in cases}
    peaks = {(name, kind): peak_of(name, inputs, GRADIENTS[kind]) for name, kind in cases}
    for turn in range(args.rounds):
        first = 5 * turn % len(cases) + turn // 3
        for name, kind in cases[first:] + cases[:first]:
            seconds, losses = run(name, inputs, GRADIENTS[kind], clock)
            error = float((losses - exact).abs().max() / exact.abs().max()) if name != SUM else 0.0
            results[name, kind].append((seconds, error))
    lines: list[list[str]] = []
    for name, kind in cases:
        rows, peak = results[name, kind], peaks[name, kind]
        # A reference model is held against the training step beside which it runs.
        beside = results[SUM, "trained" if kind == "none" else kind]
        times = [row[0] / other[0] for row, other in zip(rows, beside, strict=True)]
        lines.append(
            [
                *(str(dtype).removeprefix("torch."), kind, name),
                f"{statistics.median(row[0] for row in rows):.3f}",
                median_and_range(times, 2),
                f"{peak / 2**20:,.0f}",
                f"{peak / peaks[PLAIN, kind]:.2f}",
                f"{peak / peaks[TRL, kind]:.2f}",
                "" if name == SUM else f"{max(row[1] for row in rows):.1e}",
            ]
        )
    return lines


def main() -> None:
    args = parser_of_shapes(__doc__, ("float32", "bfloat16")).parse_args()
    device, where = device_and_name(args)
    lines = [
        f"T={args.tokens}, H={args.hidden}, V={args.vocab}, {where}, {args.rounds} rounds, "
        f"torch {torch.__version__}",
        "",
    ]
    rows: list[list[str]] = []
    for dtype in args.dtypes:
        rows += compare(args, getattr(torch, dtype), device)
    taken = f"{'CPU ' if args.cpu_time else ''}seconds"
    head = ["dtype", "head's gradient", "losses", taken, "beside the chunked cross entropy (min to max)"]
    lines += table([*head, "peak MiB", "of log_softmax's", "of TRL's", "largest error"], rows)
    publish("Losses of tokens without logits", lines, args.output)


if __name__ == "__main__":
    main()
