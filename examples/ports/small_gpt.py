"""A GPT of the shape of litgpt's: ``transformer = ModuleDict(wte, h, ln_f)``, ``forward(idx)`` to logits.

It stands in for ``litgpt.model`` in ``litgpt_full.py``, so that the port runs without litgpt.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Config:
    """As litgpt's, as far as it goes here."""

    padded_vocab_size: int = 512
    block_size: int = 256
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 64


class Block(nn.Module):
    """Causal attention with rotary positions and a feed-forward, each normed and beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.norm_1, self.norm_2 = nn.RMSNorm(config.n_embd), nn.RMSNorm(config.n_embd)
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.out = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        q, k = _rotate(heads[0], cos, sin), _rotate(heads[1], cos, sin)
        attended = F.scaled_dot_product_attention(q, k, heads[2], is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.out(F.gelu(self.fc(self.norm_2(x))))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class GPT(nn.Module):
    """Token ids ``(B, T)`` to logits ``(B, T, padded_vocab_size)``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.RMSNorm(config.n_embd),
            }
        )
        half = config.n_embd // config.n_head // 2
        angles = torch.outer(torch.arange(config.block_size), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[: idx.shape[1]], self.sin[: idx.shape[1]]
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x, cos, sin)
        return self.lm_head(self.transformer.ln_f(x))
