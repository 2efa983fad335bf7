"""A few layers of the planned model, trained by this library on all ranks, and by plain torch on one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from fsdp_sft._model.adapters import add_adapters
from fsdp_sft._ranks.mesh import data_parallel_place
from fsdp_sft._tensors.gather import Gatherer
from fsdp_sft.attention.context_parallel import use_context_parallel
from fsdp_sft.check.cluster import Cluster, mesh_of
from fsdp_sft.check.layers import without_bars
from fsdp_sft.planner.model import auto_class
from fsdp_sft.shard.apply import shard_model
from fsdp_sft.shard.compile import compile_blocks
from fsdp_sft.targets import IGNORE_INDEX
from fsdp_sft.weights import build_meta_model, load_weights

_LORA_RANK = 4
_AT_ONCE = 32  # rows of one process's forward


@dataclass(frozen=True)
class Batches:
    """Rows of equal length, of which each data-parallel share gets the same number.

    Attributes:
        ids: ``(shares, rows, length)``, int64.
        labels: The same, with another number of targets in each row.
    """

    ids: torch.Tensor
    labels: torch.Tensor

    def of(self, share: int) -> dict[str, torch.Tensor]:
        """The batch of one share."""
        return {"input_ids": self.ids[share], "labels": self.labels[share]}


def sharded_model(cluster: Cluster, folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model as the job would train it, computing in ``dtype``.

    Collective: all ranks.
    """
    asked, mesh = cluster.asked, mesh_of(cluster)
    model: Any = build_meta_model(folder)
    if asked.frozen_dtype is not None:
        from peft import LoraConfig

        model = add_adapters(
            model, LoraConfig(r=_LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:  # the same for each dtype; B would begin at 0, and A have no gradient
                    parameter.copy_(0.1 * torch.arange(parameter.numel()).sin().view_as(parameter))
    if asked.compile:
        compile_blocks(model)
    shard_model(
        model,
        mesh=mesh,
        frozen_dtype=torch.bfloat16 if asked.frozen_dtype == "bfloat16" else asked.frozen_dtype,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        ep_size=asked.ep_size,
    )
    load_weights(model, folder)
    if asked.cp > 1:
        use_context_parallel(model, mesh=mesh)
    trained: nn.Module = model.train()
    return trained


def make_batches(cluster: Cluster, config: Any, *, rows: int, length: int) -> tuple[Batches, int]:
    """Batches for all shares of the mesh, the same on all ranks, and the index of this rank's.

    Collective: all ranks, the first time.
    """
    own, shares = data_parallel_place(mesh_of(cluster))
    vocabulary = config.get_text_config(decoder=True).vocab_size
    place = torch.arange(shares * rows * length, dtype=torch.int64)
    ids = (place * 7919 + place // length * 104729 + 11) % (vocabulary - 3) + 3
    ids = ids.view(shares, rows, length)
    labels = ids.clone()
    for index, row in enumerate(labels.view(-1, length)):
        row[: 1 + index * 5 % (length // 2)] = IGNORE_INDEX
    return Batches(ids, labels), own


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """On rank 0 all parameters whole, as float32 in host memory; on the others nothing.

    Collective: all ranks.
    """
    gatherer = Gatherer()
    found = {}
    for name, parameter in model.named_parameters():
        whole = gatherer.gather(parameter, torch.float32)
        if whole is not None:
            found[name] = whole
    gatherer.finish("gathering a few layers")
    return found


class PlainTraining:
    """The same training written out plainly, in one process, with nothing of this library in the step.

    Args:
        model: The whole model, in float32.
        twin: The same in another dtype, in which to compute; None computes in float32.
    """

    def __init__(self, model: nn.Module, twin: nn.Module | None = None) -> None:
        self.model, self._twin = model, twin

    def step(self, batches: Batches, *, rate: float, max_norm: float) -> tuple[float, float]:
        """(mean loss per target, norm of the gradient); then a clipped step of gradient descent."""
        device = next(self.model.parameters()).device
        twin: Any = self._twin or self.model
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), twin.parameters(), strict=True):
                theirs.copy_(mine)
                theirs.grad = None
        total, targets = torch.zeros((), dtype=torch.float64), 0
        count = int((batches.labels[..., 1:] != IGNORE_INDEX).sum())
        rows = (whole.flatten(0, 1).split(_AT_ONCE) for whole in (batches.ids, batches.labels))
        for ids, labels in zip(*rows, strict=True):
            logits = twin(input_ids=ids.to(device)).logits[:, :-1].float().flatten(0, 1)
            wanted = labels[:, 1:].to(device).flatten()
            loss = F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
            (loss / count).backward()
            total += loss.detach().double().cpu()
            targets += int((wanted != IGNORE_INDEX).sum())
        gradients = [
            (mine, theirs.grad.float())
            for mine, theirs in zip(self.model.parameters(), twin.parameters(), strict=True)
            if theirs.grad is not None
        ]
        squares = sum(
            (gradient.double().square().sum() for _, gradient in gradients),
            torch.zeros((), dtype=torch.float64),
        )
        norm = float(torch.as_tensor(squares).sqrt())
        scale = min(1.0, max_norm / (norm + 1e-6))
        with torch.no_grad():
            for parameter, gradient in gradients:
                parameter.sub_(gradient * scale, alpha=rate)
        return float(total) / targets, norm


def plain_model(
    folder: Path, device: torch.device, values: dict[str, torch.Tensor] | None, dtype: torch.dtype
) -> nn.Module:
    """The whole model on one device, by ``from_pretrained`` or with these values and adapters."""
    from transformers import AutoConfig

    with without_bars():
        config = AutoConfig.from_pretrained(folder)
        model: Any = auto_class(config).from_pretrained(folder, dtype=dtype)
    if values is not None:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=_LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
        missing, unexpected = model.load_state_dict(values, strict=False)
        lost = [name for name in missing if name in dict(model.named_parameters())]
        if lost or unexpected:
            raise KeyError(f"the plain model has other parameters: {(lost or unexpected)[0]}")
    trained: nn.Module = model.to(device).train()
    return trained
