"""FSDP2 building blocks for supervised fine-tuning of Hugging Face causal language models.

Every public name can be imported from here; the module that owns it is loaded on first use, so importing
the package starts nothing and costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_sft.blocks import find_blocks as find_blocks
    from fsdp_sft.distributed import DistributedContext as DistributedContext
    from fsdp_sft.distributed import build_mesh as build_mesh
    from fsdp_sft.distributed import init_distributed as init_distributed

__version__ = "0.1.0"

_OWNERS = {
    "DistributedContext": "distributed",
    "ResumableSampler": "sampler",
    "apply_sac": "sac",
    "causal_lm_loss": "loss",
    "compile_blocks": "shard",
    "count_targets": "loss",
    "describe_sharding": "shard",
    "evaluate": "step",
    "gradient_sync": "step",
    "loss_sum": "loss",
    "remove_sac": "sac",
    "scale_for_backward": "loss",
    "select_block_indices": "sac",
    "shard_model": "shard",
    "train_step": "step",
    "windows": "step",
    "build_mesh": "distributed",
    "find_blocks": "blocks",
    "init_distributed": "distributed",
}

__all__ = sorted([*_OWNERS, "__version__"])


def __getattr__(name: str) -> Any:
    owner = _OWNERS.get(name)
    if owner is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{owner}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
