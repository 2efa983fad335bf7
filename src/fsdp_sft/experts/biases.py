"""Finds the biases by which routers without a loss keep experts evenly busy."""

from collections.abc import Iterable

import torch
from torch import nn

from fsdp_sft._model import named_tensors


def biases_of(model: nn.Module, experts: Iterable[tuple[str, int]]) -> dict[str, tuple[str, torch.Tensor]]:
    """By layer its bias: the one tensor beside its experts, untrained, with one number an expert.

    Args:
        model: Inside of wrappers.
        experts: FQNs of the modules with experts, and how many these are.

    Returns:
        From those FQNs to the bias's name and itself, for layers that have one.
    """
    found = {}
    for name, number in experts:
        placed = name.removesuffix(".base_layer")  # where peft has put adapters around
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
