"""What the room `_compat` finds out by private names."""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_sft._compat.compile import (
    changes_its_inputs,
    draws_random_numbers_now,
    modules_being_traced,
)


def test_which_module_is_being_traced() -> None:
    assert modules_being_traced() == []
    seen: list[list[str]] = []

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        seen.append(modules_being_traced())
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU())])

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model[0], x, use_reentrant=False, context_fn=contexts)

    torch.compile(run, backend="aot_eager", fullgraph=True)(torch.ones(1, 2)).sum().backward()
    assert any(path.endswith(".0.0") for path in sum(seen, [])), seen


def test_what_an_operator_does() -> None:
    aten = torch.ops.aten
    assert changes_its_inputs(aten.add_.Tensor)
    assert not changes_its_inputs(aten.mm.default)
    attention = aten._scaled_dot_product_flash_attention.default
    assert draws_random_numbers_now(attention, (1, 2, 3, 0.1), {})
    assert not draws_random_numbers_now(attention, (1, 2, 3, 0.0), {})
    assert not draws_random_numbers_now(attention, (1, 2, 3), {})
    assert draws_random_numbers_now(aten.native_dropout.default, (), {})
    assert not draws_random_numbers_now(aten.mm.default, (), {})
