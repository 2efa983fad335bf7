"""Other tools' names for the parameters of Llama 3 and Qwen 3, and their order of rows.

Llama's own rotary embedding rotates neighbouring rows of a head together (0 with 1, 2 with 3, ...). That of
Hugging Face rotates a row of the head's first half with one of the second (of n rows, 0 with n / 2, 1 with
n / 2 + 1, ...). The rows of the projections to queries and keys are stored accordingly.

Sources: torchtitan, ``models/llama3`` and ``models/qwen3``, ``state_dict_adapter.py``; torchtune,
``models/convert_weights.py`` and ``models/qwen3/_convert_weights.py``; transformers,
``models/llama/convert_llama_weights_to_hf.py``.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fsdp_sft._tensors.boxes import Box
from fsdp_sft.dcp_io.foreign.source import ForeignTensor

KeyMap = Mapping[str, str | None] | Callable[[str], str | None]

_COMMON = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
}
_TITAN = {
    **_COMMON,
    "norm.weight": "model.norm.weight",
    "layers.{}.attention.wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.wk.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.attention.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "layers.{}.attention.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "layers.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
}
_TUNE = {
    **_COMMON,
    "norm.scale": "model.norm.weight",
    "layers.{}.attn.q_proj.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attn.k_proj.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attn.v_proj.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attn.output_proj.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.attn.q_norm.scale": "model.layers.{}.self_attn.q_norm.weight",
    "layers.{}.attn.k_norm.scale": "model.layers.{}.self_attn.k_norm.weight",
    "layers.{}.mlp.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.mlp.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.mlp.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.sa_norm.scale": "model.layers.{}.input_layernorm.weight",
    "layers.{}.mlp_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
}
TABLES = {"torchtitan": _TITAN, "torchtune": _TUNE}
_MODEL_TYPES = ("llama", "qwen3")
_QUERIES_OR_KEYS = re.compile(r"\.self_attn\.[qk]_proj\.weight$")


def kind_of(names: Iterable[str]) -> str | None:
    """The tool whose names these are: one of ``TABLES``, "hugging face", or None if they are not known."""
    known = {abstract(name) for name in names}
    for kind, table in TABLES.items():
        if {"tok_embeddings.weight"} < known and known & (table.keys() - _COMMON.keys() - {"norm.weight"}):
            return kind
    theirs = ("model.", "transformer.", "lm_head.")
    return "hugging face" if any(name.startswith(theirs) for name in known) else None


def abstract(name: str) -> str:
    """A name with its first number replaced: ``layers.3.x`` becomes ``layers.{}.x``."""
    return re.sub(r"\.\d+\.", ".{}.", name, count=1)


def translated(name: str, kind: str, key_map: KeyMap | None) -> str | None:
    """The model's name of a parameter that another tool calls ``name``; None if it is left out.

    A name that is neither in the map nor in the tool's table stays as it is.
    """
    if callable(key_map):
        return key_map(name)
    if key_map is not None and name in key_map:
        return key_map[name]
    target = TABLES.get(kind, {}).get(abstract(name))
    number = re.search(r"\.(\d+)\.", name)
    if target is None:
        return name
    return target.format(number[1]) if number else target


def check_known(kind: str, config: Any) -> None:
    """Check that the table of a tool is valid for models of a config's type.

    Raises:
        ValueError: If it is not.
    """
    found = getattr(config, "model_type", None)
    if kind in TABLES and found not in _MODEL_TYPES:
        raise ValueError(
            f"the names and the order of rows that {kind} has for models of type {found!r} are not known "
            f"here, only those of {' and '.join(_MODEL_TYPES)}: pass key_map, if "
            f"{kind} stores the rows of queries and keys in the order of transformers"
        )


def in_order(name: str, tensor: ForeignTensor, kind: str, config: Any) -> ForeignTensor:
    """A tensor with its rows in transformers' order; only Llama's queries and keys need a new one."""
    is_llama = kind in TABLES and getattr(config, "model_type", None) == "llama"
    if not is_llama or not _QUERIES_OR_KEYS.search(name):
        return tensor
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if tensor.shape[0] % head_dim or head_dim % 2:
        raise ValueError(f"{name} has {tensor.shape[0]} rows, not a whole number of heads of {head_dim}")

    def read(wanted: Box) -> torch.Tensor:
        # A row's place depends on its head alone, so whole heads are read and reordered, then the rows taken.
        first = wanted.offset[0] // head_dim * head_dim
        end = -(-(wanted.offset[0] + wanted.shape[0]) // head_dim) * head_dim
        heads = tensor.read(Box((first, *wanted.offset[1:]), (end - first, *wanted.shape[1:])))
        halves: torch.Tensor = heads.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        return halves[wanted.offset[0] - first :][: wanted.shape[0]]

    return ForeignTensor(tensor.shape, tensor.dtype, read)
