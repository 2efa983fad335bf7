"""Loss and gradients of rows that ranks share, and how far they are from others."""

from typing import Any

import torch
import torch.distributed as dist

import fsdp_sft as fs
from tests.harness.device import device_here
from tests.harness.losses import with_loss
from tests.harness.models import full


def shared_gradients(
    model: Any, mesh: Any, batch: dict[str, torch.Tensor], **loss: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a model whose ranks share rows, over all ranks, and its gradients by name."""
    batch = {name: value.to(device_here()) for name, value in batch.items()}
    num_targets = fs.count_targets([batch], mesh=mesh)
    own = fs.causal_lm_loss(with_loss(model, router_loss="off", **loss), batch, num_targets=num_targets)
    own.backward()
    total = own.detach().double()
    dist.all_reduce(total)
    found: Any = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return total.item() / dist.get_world_size(), found


def largest_differences(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> list[tuple[str, float, float]]:
    """(name, largest difference, largest element) of each gradient; one that is missing is 0."""
    zero = torch.zeros(())
    pairs = [
        (name, found.get(name, zero), expected.get(name, zero)) for name in found.keys() | expected.keys()
    ]
    return [(name, float((a - b).abs().max()), float(b.abs().max())) for name, a, b in pairs]
