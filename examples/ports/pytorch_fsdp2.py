"""pytorch/examples' FSDP2 example, ported: a small transformer of its own, sharded, trained, saved, resumed.

    torchrun --standalone --nproc-per-node 2 examples/ports/pytorch_fsdp2.py

After https://github.com/pytorch/examples/tree/main/distributed/FSDP2 (BSD-3-Clause), in our own words. What
came and what went, and what the original does without a word: examples/ports/README.md.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import fsdp_sft as fs


class Block(nn.Module):
    """Attention over all positions and a feed-forward, each after a layer norm and beside a residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        split = (x.shape[0], x.shape[1], self.num_heads, -1)
        q, k, v = (project(normed).view(split).transpose(1, 2) for project in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.w2(F.gelu(self.w1(self.ffn_norm(x))))


class Transformer(nn.Module):
    """Token ids ``(B, S)`` to float32 logits ``(B, S, vocabulary)``; nothing of it is transformers'."""

    def __init__(
        self, *, vocab_size: int, max_length: int, width: int, num_heads: int, num_layers: int
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, width)
        self.pos_embeddings = nn.Embedding(max_length, width)
        self.layers = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tok_embeddings(tokens) + self.pos_embeddings(positions)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x)).float()


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A transformer of one's own under FSDP2")
    add = parser.add_argument
    add("--steps", type=int, default=10, help="optimizer steps of this run")
    add("--batch-size", type=int, default=32, help="rows per rank")
    add("--length", type=int, default=64, help="tokens per row")
    add("--layers", type=int, default=10)
    add("--vocab-size", type=int, default=1024)
    add("--learning-rate", type=float, default=1e-2)
    add("--mixed-precision", action="store_true", help="bfloat16 compute over float32 shards")
    add("--explicit-prefetching", action="store_true", help="gather two blocks ahead")
    add("--checkpoints", type=Path, default=Path("checkpoints"))
    return parser.parse_args(words)


def build_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)  # the same values on all ranks, as shard_model wants them
    return Transformer(
        vocab_size=args.vocab_size, max_length=args.length, width=16, num_heads=4, num_layers=args.layers
    )


def sum_of_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).sum()


def one(tokens: torch.Tensor) -> int:
    """What the loss is divided by: a batch counts once, so that ranks' sums are averaged as FSDP2 does."""
    return 1


def train(args: argparse.Namespace) -> list[fs.StepResult]:
    """Train, save, and return what each step did; its loss is the mean over ranks."""
    context = fs.init_distributed()
    mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if args.mixed_precision else {}
    model = fs.shard_model(
        build_model(args),
        mesh=fs.build_mesh(),
        mp_policy=MixedPrecisionPolicy(**mixed),
        prefetch=2 if args.explicit_prefetching else 0,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    done = 0
    if fs.find_checkpoints(args.checkpoints):
        done = fs.load_checkpoint(args.checkpoints, model=model, optimizer=optimizer).step
    rows = torch.Generator().manual_seed(context.rank + context.world_size * done)  # other rows on each rank
    results = []
    for _ in range(args.steps):
        tokens = torch.randint(0, args.vocab_size, (args.batch_size, args.length), generator=rows)
        results.append(fs.train_step(model, [tokens], optimizer, loss_fn=sum_of_logits, count_fn=one))
    fs.save_checkpoint(args.checkpoints, done + args.steps, model=model, optimizer=optimizer)
    return results


def main() -> None:
    for step, result in enumerate(train(parse_arguments()), start=1):
        if dist.get_rank() == 0:
            print(f"step {step}: loss {result.loss:.6f}, gradient norm {result.grad_norm:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
