"""One training step under the default policy beside plain bf16 transformers, which keeps parts in float32."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fsdp_sft as fs
from fsdp_sft.weights import build_meta_model, load_weights
from tests.harness.architectures import class_names, inputs_for, quiet, save_all, tiny_architecture
from tests.harness.hf_folders import plain
from tests.harness.models import full
from tests.harness.ranks import mesh_here, on_ranks, run_distributed

# One of each way: a module that owns one such parameter (Flint) or beside others (Inkling's
# router), a convolution used by its weight (BailingHybrid, Inkling), buffers computed in bf16 (MiniMax), made
# in float32 without being listed (HunYuanMoE), float32 between blocks (Olmo).
ALWAYS = [
    "BailingHybridForCausalLM",
    "FlintForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "InklingForCausalLM",
    "MiniMaxForCausalLM",
    "OlmoForCausalLM",
]
# Plain transformers cannot train these in bf16, and why.
NOT_RUNNABLE = {
    "Gemma4AssistantForCausalLM": "cannot be built",
    "Gemma4UnifiedAssistantForCausalLM": "is handed float32 hidden states by the model that it assists",
    "DbrxForCausalLM": "transformers 5.17 refuses the config that it wrote",
}


@dataclass(frozen=True)
class Outcome:
    """How a step compares: why plain transformers cannot, or what differs."""

    not_runnable: str = ""
    problem: str = ""


def _step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    output = model(**inputs_for(model))
    loss = output.loss if getattr(output, "loss", None) is not None else output.logits.float().square().mean()
    loss.backward()
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach().float().cpu(), {name: gradient.float() for name, gradient in gradients.items()}


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in other))


def _check_one(folder: Path, mesh: Any, sac: bool) -> Outcome:
    try:
        expected = _step(_in_bf16(folder))
    except Exception as error:
        return Outcome(not_runnable=f"{type(error).__name__}: {str(error)[:150]}")
    model = build_meta_model(folder)
    if sac:
        fs.apply_sac(model, 1)
    fs.shard_model(model, mesh=mesh)
    load_weights(model, folder)
    with torch.no_grad():  # after which all that was gathered by itself is free again
        model(**inputs_for(model))
    found = _step(model)
    if not torch.equal(found[0], expected[0]) or found[1].keys() != expected[1].keys():
        return Outcome(problem=f"loss {found[0].item()} instead of {expected[0].item()}")
    if all(torch.equal(found[1][name], expected[1][name]) for name in expected[1]):
        return Outcome()
    # FSDP2's hooks change the order in which autograd adds the gradients of a tensor with several users.
    exact = _step(plain(folder))[1]
    errors = _distance(found[1], exact), _distance(expected[1], exact)
    return Outcome(problem="" if errors[0] <= 3 * errors[1] else f"errors of the gradients: {errors}")


def _in_bf16(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, config.architectures[0])
    return cls.from_pretrained(folder, dtype=torch.bfloat16).train()


@quiet()
def _check_all(folder: Path, names: list[str], sac: bool) -> dict[str, Outcome]:
    mesh = mesh_here()
    outcomes = {}
    for name in names:
        try:
            outcomes[name] = _check_one(folder / name, mesh, sac)
        except Exception as error:
            outcomes[name] = Outcome(problem=f"{type(error).__name__}: {str(error)[:300]}")
    return outcomes


SELECTION = [name for name in ALWAYS if hasattr(transformers, name)]  # transformers 5.17 lacks two
EVERY = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.mark.parametrize(
    ("names", "ranks", "sac"),
    [(SELECTION, 1, False), (SELECTION, 2, True), pytest.param(class_names(), 2, False, marks=EVERY)],
    ids=["a selection", "recomputed", "every causal LM"],
)
@quiet()
def test_they_train_as_plain_transformers_does(
    names: list[str], ranks: int, sac: bool, tmp_path: Path
) -> None:
    failed = save_all(tmp_path, names)
    names = [name for name in names if name not in failed]
    assert len(names) >= 4
    by_rank = run_distributed(_check_all, ranks, tmp_path, names, sac, timeout=2400)
    failed |= {name: one.not_runnable for name, one in by_rank[0].items() if one.not_runnable}
    assert failed.keys() <= NOT_RUNNABLE.keys(), failed
    wrong = {
        name: [r[name].problem for r in by_rank] for name in names if any(r[name].problem for r in by_rank)
    }
    assert wrong == {}


@on_ranks(2)
def test_a_head_that_is_asked_for_its_dtype_before_it_is_gathered() -> None:
    ids = torch.arange(3, 19).view(2, 8)
    for name in ("MambaForCausalLM", "Mamba2ForCausalLM"):
        model = tiny_architecture(name)
        expected = copy.deepcopy(model).to(torch.bfloat16)(input_ids=ids, use_cache=False).logits
        fs.shard_model(model, mesh=mesh_here())
        logits = model(input_ids=ids, use_cache=False).logits.cpu()
        torch.testing.assert_close(logits, expected, rtol=0.0, atol=0.1)
