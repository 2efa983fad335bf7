"""Update the biases by which routers balance their experts without a loss."""

from collections.abc import Iterable

import torch
from torch import nn

from fsdp_sft._model.sharded import reshard
from fsdp_sft._model.view import named_tensors, unwrapped
from fsdp_sft._tensors.boxes import box_of, local_of, part_of
from fsdp_sft.experts.counter import counter_of


def update_router_bias(model: nn.Module, *, rate: float) -> list[str]:
    """Raise the bias of experts that got too few tokens in the last step, and lower that of busier ones.

    ``bias += rate * sign(mean load - load)``, as in the training of models that balance their experts without
    a loss (DeepSeek-V3, GLM-4 MoE). If it is never called, the biases stay as the checkpoint has them.

    Args:
        model: Model for which ``watch_experts`` was called before the last ``train_step``.
        rate: Size of the step, above 0.

    Returns:
        Names of the updated biases; none if the last window had no targets, failed, or was used before.

    Raises:
        ValueError: If the model has no such bias, or has one of 16 bits, in which such steps are lost; if no
            step of it was watched, or the rate is not above 0.

    Collective: none, but call it on every rank after ``train_step``. All ranks know the load of all.
    Source: arXiv:2408.15664, algorithm 1; arXiv:2412.19437, section 2.1.2, with a rate of 0.001.

    Example:
        >>> from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
        >>> sizes = {"vocab_size": 640, "hidden_size": 96, "num_hidden_layers": 2}
        >>> tiny = Glm4MoeConfig(**sizes, n_routed_experts=8)
        >>> mixture = Glm4MoeForCausalLM(tiny)
        >>> fs.watch_experts(mixture)
        ['model.layers.1.mlp.experts']
        >>> result = fs.train_step(mixture, window, torch.optim.AdamW(mixture.parameters()))
        >>> fs.update_router_bias(mixture, rate=0.001)
        ['model.layers.1.mlp.gate.e_score_correction_bias']
    """
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
        raise ValueError(f"rate must be a number above 0, got {rate!r}")
    counter = counter_of(model)
    if counter is not None and counter.is_empty:
        return []
    if counter is None or not counter.last:
        raise ValueError("no load of experts is known: call watch_experts(model), then train_step")
    biases = biases_of(unwrapped(model), counter.experts)
    if not biases:
        raise ValueError(
            f"{type(unwrapped(model)).__name__} has no bias that balances its experts; see router_loss= of "
            "prepare_loss for models that do so by a loss"
        )
    for name, bias in biases.values():
        if bias.dtype.itemsize < 4:
            raise ValueError(f"{name} is {bias.dtype}, in which steps of {rate} are lost; keep it in float32")
    reshard(model)  # a gathered copy of a bias would keep the old values
    for (layer, _), counts in zip(counter.experts, counter.last, strict=True):
        if layer not in biases:
            continue
        _, bias = biases[layer]
        load = counts.to(torch.float32)
        step = (rate * (load.mean() - load).sign()).to(bias.dtype).reshape(bias.shape)
        with torch.no_grad():
            local_of(bias).add_(part_of(step, box_of(bias)))
    counter.is_empty = True
    return [name for name, _ in biases.values()]


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
