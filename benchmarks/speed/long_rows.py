"""Steps of a row whose tokens ranks share, beside the same ranks with rows of their own.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.speed.long_rows

Three ways take turns, step by step, on the same number of ranks, with the same weights. Where ranks share
cores with each other and with others, their CPU seconds say more than seconds. The ways:

- shared: one row, its tokens over all ranks (cp);
- cut: as many tokens in all, each rank with a row of its own that is as much shorter;
- whole: each rank with a whole row of its own, which does the same work a token as "shared" and counts as
  1/ranks of its time.

Shared over whole is what sharing costs: exchanges around attention, and one row's waits. Shared over cut is
what a longer row costs besides, by attention. The exchanges are also timed alone, with tensors of the same
sizes.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_sft as fs
from benchmarks.tables import publish, quartiles, table
from fsdp_sft.attention.context_parallel.group import to_heads, to_tokens

HEAD_SIZE, VOCABULARY = 32, 512


@dataclass(frozen=True)
class Spent:
    """On a step: seconds, and CPU seconds of all ranks; or ratios of these."""

    seconds: float
    cpu: float


def shown(values: Sequence[Spent]) -> list[str]:
    columns = [value.seconds for value in values], [value.cpu for value in values]
    return [f"{statistics.median(of):.2f} ({quartiles(of)})" for of in columns]


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // HEAD_SIZE,
        num_key_value_heads=args.hidden // HEAD_SIZE,
        max_position_embeddings=args.tokens,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def one_row(tokens: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def steps_of(args: argparse.Namespace) -> dict[str, Callable[[int], Any]]:
    """An optimizer step of each way, by its number."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    models = {"shared": make_model(args)}
    models["own"] = copy.deepcopy(models["shared"])
    optimizers = {}
    meshes = {"shared": args.mesh, "own": fs.build_mesh(device_type="cpu")}
    for name, model in models.items():
        mesh = meshes[name]
        fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        fs.use_context_parallel(model, mesh=mesh)
        optimizers[name] = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(name: str, batch: dict[str, torch.Tensor]) -> None:
        fs.train_step(models[name], [batch], optimizers[name])

    return {
        "shared": lambda number: step("shared", one_row(args.tokens, number)),
        "cut": lambda number: step("own", one_row(args.tokens // ranks, ranks * number + rank)),
        "whole": lambda number: step("own", one_row(args.tokens, ranks * number + rank)),
    }


def exchanges(args: argparse.Namespace) -> None:
    """Those of a step of "shared", forward and backward."""
    from fsdp_sft.attention.context_parallel import sequence_group_in

    group = sequence_group_in(args.mesh)
    assert group is not None
    heads = args.hidden // HEAD_SIZE
    part = [torch.randn(1, heads, args.tokens // group.size, HEAD_SIZE, requires_grad=True) for _ in range(3)]
    for _ in range(args.layers):
        query, key, value = to_heads(part, group)
        to_tokens((query + key + value).transpose(1, 2), group).sum().backward()


def bytes_sent(args: argparse.Namespace, ranks: int) -> int:
    """That leave a rank in a step of "shared": queries, keys, values and outputs, forward and backward."""
    return 2 * args.layers * 4 * args.hidden * args.tokens // ranks * (ranks - 1) // ranks * 4


def attention_share(args: argparse.Namespace) -> float:
    """Of the multiplications of a step of "shared", those of attention's products (causal: half of them)."""
    own = args.layers * args.tokens * args.hidden
    linear = sum(p.numel() for n, p in make_model(args).named_parameters() if p.ndim > 1 and "embed" not in n)
    return own / (own + linear)


def measure(args: argparse.Namespace) -> dict[str, list[Spent]]:
    """Of every way and of the exchanges alone, taking turns."""
    steps = steps_of(args)
    steps["exchanges alone"] = lambda _number: exchanges(args)
    names = list(steps)
    spent: dict[str, list[Spent]] = {name: [] for name in names}
    for number in range(args.steps + 1):
        for name in names[number % 4 :] + names[: number % 4]:
            spent[name].append(timed(lambda step=steps[name], number=number: step(number)))  # type: ignore[misc]
    return {name: times[1:] for name, times in spent.items()}  # the first allocate


def timed(step: Callable[[], Any]) -> Spent:
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    step()
    own = torch.tensor([time.process_time() - worked])
    dist.all_reduce(own)
    return Spent(time.perf_counter() - start, float(own))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("hidden", 256), ("layers", 4), ("tokens", 8192), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, help="also write the table there")
    args = parser.parse_args()
    context = fs.init_distributed(device_type="cpu")
    torch.set_num_threads(1)
    args.mesh = fs.build_mesh(cp=context.world_size, device_type="cpu")
    spent, ranks = measure(args), context.world_size
    rows = [[name, *shown(of)] for name, of in spent.items()]
    for way, parts in (("whole", ranks), ("cut", 1)):
        pairs = [
            Spent(a.seconds * parts / b.seconds, a.cpu * parts / b.cpu)
            for a, b in zip(spent["shared"], spent[way], strict=True)
        ]
        rows.append([f"shared / ({way} / {parts})" if parts > 1 else f"shared / {way}", *shown(pairs)])
    shares = [
        Spent(a.seconds / b.seconds, a.cpu / b.cpu)
        for a, b in zip(spent["exchanges alone"], spent["shared"], strict=True)
    ]
    rows.append(["exchanges alone / shared", *shown(shares)])
    lines = [
        f"{ranks} gloo ranks of one thread on {os.cpu_count()} cores, float32, Llama of {args.layers} "
        f"layers, hidden {args.hidden}, one row of {args.tokens} tokens, {args.steps} alternating steps, "
        f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f} at the end. A rank sends "
        f"{bytes_sent(args, ranks) / 2**20:.1f} MiB a step in exchanges; attention's products are "
        f"{attention_share(args):.0%} of the multiplications of shared.",
        "",
        *table(["", "seconds (quartiles)", "CPU seconds of all ranks (quartiles)"], rows),
    ]
    if context.is_main:
        publish("What sharing a row costs in time", lines, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
