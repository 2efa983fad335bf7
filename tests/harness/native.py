"""Models that transformers shards by itself while it loads them."""

import copy
import os
from pathlib import Path
from typing import Any

import torch

from tests.harness.architectures import quiet, tiny_architecture


def save_mixture(folder: Path, name: str = "MixtralForCausalLM", **overrides: Any) -> str:
    """A tiny mixture in the format of the Hub; fields of its config as ``overrides``."""
    with quiet():
        model = tiny_architecture(name)
        if overrides:
            torch.manual_seed(0)
            config = copy.deepcopy(model.config)
            for field, value in overrides.items():
                setattr(config, field, value)
            model = type(model)(config)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
    return os.fspath(folder)


def load_native(folder: str, options: dict[str, Any] | None, *, dtype: torch.dtype = torch.float32) -> Any:
    """Load a folder as transformers does: sharded by ``DistributedConfig(**options)``, or plainly for None.

    In float64 experts are run by an implementation that takes it.
    """
    import transformers as tf

    more: dict[str, Any] = {}
    if options is not None:
        from transformers.distributed import DistributedConfig

        more["distributed_config"] = DistributedConfig(**options)
    if dtype == torch.float64:
        more["experts_implementation"] = "eager"
    with quiet():
        return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more).train()


def rows_of_rank(batches: list[Any], options: dict[str, Any]) -> list[Any]:
    """The batches of this rank, where those along ``tp`` have the same."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    shares = options.get("fsdp_size", 1) * options.get("dp_replicate_size", 1)
    return batches[rank * shares // ranks :: shares]
