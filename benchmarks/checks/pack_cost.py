"""How long ranks wait for each other with packs of rows of very different lengths: modelled, not timed.

    python -m benchmarks.checks.pack_cost --rows 20000 1000000 --output pack-cost.md

A round takes as long as its most expensive pack costs. A "step over even" of 1.2 is an epoch that takes 1.2
times as long as with equal costs on all ranks. The bound is what no order of these rows can be below: the
longest row is in some round, whose packs hold no more than a pack's tokens, in rows as long as there are.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaConfig

import fsdp_sft as fs
from benchmarks.tables import publish, table
from fsdp_sft.sampling.bins import deal

CAPACITIES = (4096, 32768, 131072)
RANKS = (8, 64, 512)
# Llama 2 7B: https://huggingface.co/meta-llama/Llama-2-7b-hf, config.json
SEVEN_B = LlamaConfig(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
)


def long_tailed(number: int, most: int) -> list[int]:
    """Log-normal lengths with a median of 600 and a sigma of 1.3, cut to ``most``."""
    generator = torch.Generator().manual_seed(0)
    lengths = 600 * torch.exp(1.3 * torch.randn(number, generator=generator))
    return [int(length) for length in lengths.clamp(1, most)]


def step_over_even(
    lengths: list[int], capacity: int, ranks: int, weighed: tuple[float, float], **options: object
) -> tuple[float, int, float]:
    """(what an epoch takes over what it would take evenly, rounds, seconds to make the order)."""
    sampler = fs.PackedSampler(lengths, max_length=capacity, num_replicas=ranks, rank=0, **options)  # type: ignore[arg-type]
    start = time.monotonic()
    order = sampler._order()
    seconds = time.monotonic() - start
    taken, rounds, total = 0.0, 0, 0.0
    for first in range(0, len(order), ranks):
        packs = deal(order[first : first + ranks], sampler._weight, ranks)
        costs = [
            sum(weighed[0] * lengths[row] + weighed[1] * lengths[row] ** 2 for row in pack) for pack in packs
        ]
        taken, rounds, total = taken + max(costs), rounds + 1, total + sum(costs)
    return taken * ranks / total, rounds, seconds


def bound(lengths: list[int], capacity: int, ranks: int, cost: tuple[float, float]) -> float:
    """What no order can be below, by its most expensive round."""

    def of(tokens: int) -> float:
        return cost[0] * tokens + cost[1] * tokens**2

    total, longest = sum(map(of, lengths)), sorted(lengths, reverse=True)[:ranks]
    most = of(longest[0])
    # A pack whose longest row has so many tokens: the rest in rows no longer than that, or than what is left.
    beside = [
        min(most, cost[0] * capacity + cost[1] * (row**2 + (capacity - row) * min(row, capacity - row)))
        for row in longest
    ]
    return max(1.0, (most + max(0.0, total - sum(beside)) / ranks) * ranks / total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cost = fs.attention_cost(SEVEN_B)
    rows = []
    for number in options.rows:
        for capacity in CAPACITIES:
            lengths = long_tailed(number, capacity)
            for ranks in RANKS:
                before, rounds_before, _ = step_over_even(lengths, capacity, ranks, cost)
                after, rounds, seconds = step_over_even(lengths, capacity, ranks, cost, cost=cost)
                least = bound(lengths, capacity, ranks, cost)
                cells = [f"{number:,}", capacity, ranks, rounds_before, rounds]
                rows.append([*cells, f"{before:.4f}", f"{after:.4f}", f"{least:.4f}", f"{seconds:.1f}"])
                print(rows[-1], flush=True)
    head = ["rows", "pack", "ranks", "rounds", "with cost", "step over even", "with cost", "bound", "seconds"]
    lines = [
        "`python -m benchmarks.checks.pack_cost`: what an epoch takes over what it would take if all ranks",
        "had the same, where a round takes as long as its most expensive pack. Log-normal lengths (median",
        "600, sigma 1.3, cut to the pack), costs of Llama 2 7B by `attention_cost`:",
        f"{cost[0]:.3g} a token, {cost[1]:.3g} a squared token. The bound holds for any order of these rows.",
        "",
        *table(head, rows),
    ]
    publish("Packs that cost the same", lines, options.output)


if __name__ == "__main__":
    main()
