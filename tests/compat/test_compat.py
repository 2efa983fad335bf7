"""What the room `_compat` reads by private names, and which of its workarounds can go."""

import functools
import inspect

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_sft._compat.compile import (
    being_compiled,
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


def _version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


def test_masks_of_packs_have_the_function_that_one_end_of_the_range_has() -> None:
    from transformers import __version__, masking_utils

    by_row = hasattr(masking_utils, "packed_sequence_compatibility_function")
    assert by_row == (tuple(map(int, __version__.split(".")[:2])) < (5, 24)), (
        "with a floor without it, drop it"
    )


def test_a_traced_checkpoint_is_known_by_a_private_mode_alone() -> None:
    """torch's public ``is_compiling`` is false here, where its checkpoint takes the code for compiled."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils import checkpoint

    seen = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        seen.append((being_compiled(), checkpoint._is_compiling(None, (), {})))
        return x + 1

    assert not being_compiled()
    make_fx(traced)(torch.ones(2))
    assert seen == [(True, True)]
    make_fx(lambda x: seen.append(torch.compiler.is_compiling()) or x + 1)(torch.ones(2))
    assert seen[-1] is False, "being_compiled can go"


def test_fsdp_keeps_gradients_that_wait_when_an_iteration_is_reset() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    source = inspect.getsource(_fsdp_param_group.FSDPParamGroup._reset_iter_state)
    assert "unsharded_accumulated_grad" not in source, "see whether the public reset_iter_state is enough now"


def test_fsdp_fails_at_unused_groups_where_it_does_not_reduce() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    method = getattr(_fsdp_param.FSDPParam, "to_accumulated_grad_if_needed", None)
    assert (method is None) == (_version() >= (2, 15)), (
        "with a floor that lacks it, allow_unused_groups can go"
    )
    assert method is None or "hasattr" not in inspect.getsource(method)
