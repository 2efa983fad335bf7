"""Find the biases by which a model's routers balance their experts without a loss."""

from collections.abc import Iterable

import torch
from torch import nn

from fsdp_sft._model.named import named_tensors


def biases_of(model: nn.Module, experts: Iterable[tuple[str, int]]) -> dict[str, tuple[str, torch.Tensor]]:
    """Find the bias of each layer: the only untrained tensor next to its experts with one number per expert.

    Args:
        model: Unwrapped model.
        experts: (FQN, number of experts) of each module with experts.

    Returns:
        (name, tensor) of the bias by the FQN of the experts, for layers that have one.
    """
    found = {}
    for name, number in experts:
        placed = name.removesuffix(".base_layer")  # peft's name for the layer inside of its adapters
        beside = placed.rpartition(".")[0]
        block = model.get_submodule(beside)
        within = placed.removeprefix(f"{beside}.") + "."
        biases = [
            (f"{beside}.{key}", tensor)
            for key, tensor in named_tensors(block).items()
            if "bias" in key
            and not key.startswith(within)
            and tensor.numel() == number
            and not tensor.requires_grad
            and tensor.is_floating_point()
        ]
        if len(biases) == 1:
            found[name] = biases[0]
    return found
