"""Float32 and bfloat16: rows in parts differ from whole ones by rounding, and by no more of it."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.architectures import quiet, tiny_architecture
from tests.harness.device import device_here, mesh_here
from tests.harness.float64 import AllFloat64
from tests.harness.long_rows import PACKED, PADDED, batch_of, plain_gradients, rows_of
from tests.harness.losses import with_loss
from tests.harness.models import full
from tests.harness.ranks import run_distributed

LENGTHS = [9, 23, 1, 14, 17]
BATCHES = 4
FAMILIES = ["LlamaForCausalLM", "Gemma3ForCausalLM"]


def _model(name: str) -> Any:
    with quiet():
        return tiny_architecture(name).float().train()


def _in_parts(model: Any, mesh: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients over all ranks."""
    batch = {name: value.to(device_here()) for name, value in batch.items()}
    num_targets = fs.count_targets([batch], mesh=mesh)
    own = fs.causal_lm_loss(with_loss(model, router_loss="off"), batch, num_targets=num_targets)
    own.backward()
    total = own.detach().double()
    dist.all_reduce(total)
    gradients = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return total.item() / dist.get_world_size(), gradients  # type: ignore[return-value]


def _plain(model: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the same batch, whole, in a process."""
    logits = model(**{n: v for n, v in batch.items() if n != "labels"}, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten()
    )
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.item(), gradients


def _apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """How far gradients are apart over their size, in the norm over all parameters."""
    pairs = [(found[name].double(), of.double()) for name, of in expected.items()]
    error, size = (
        torch.stack(norms).norm()
        for norms in zip(*(((a - b).norm(), b.norm()) for a, b in pairs), strict=True)
    )
    return float(error / size)


def _distances(name: str, dtype: torch.dtype) -> dict[str, list[tuple[float, float]]]:
    """Of rows in parts and of a plain process, how far loss and gradients of batches are from float64."""
    fs.init_distributed(device_type=device_here().type)
    model = _model(name)
    # What both compute with are the rounded weights.
    truth, plain = copy.deepcopy(model).to(dtype).double(), copy.deepcopy(model).to(dtype)
    mesh = mesh_here(cp=2)
    model = model.to(device_here())
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fs.shard_model(model, mesh=mesh, mp_policy=policy)
    fs.use_context_parallel(model, mesh=mesh)
    found: dict[str, list[tuple[float, float]]] = {"in parts": [], "plain": []}
    for seed in range(BATCHES):
        rows = rows_of(LENGTHS, seed=seed)
        with AllFloat64():
            loss, gradients = plain_gradients(truth, rows)
        batch = batch_of(rows, PACKED if seed % 2 else PADDED)
        for who, (own, of) in {
            "in parts": _in_parts(model, mesh, batch),
            "plain": _plain(plain, batch),
        }.items():
            found[who].append((abs(own - loss) / loss, _apart(of, gradients)))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_rounding_is_that_of_a_plain_process(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = run_distributed(_distances, 2, name, dtype)[0]
        loss, parts, plain = (
            sum(one[index] ** 2 for one in found[who]) ** 0.5 / BATCHES**0.5
            for who, index in (("in parts", 0), ("in parts", 1), ("plain", 1))
        )
        print(f"{name}, {dtype}: loss {loss:.1e}, gradients {parts:.2e}, of a plain process {plain:.2e}")
        assert 0 < parts < 1.15 * plain
        assert loss < 4 * torch.finfo(dtype).eps
