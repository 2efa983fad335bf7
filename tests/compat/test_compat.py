"""Each private name that the room `_compat` touches is still there, and has no public form yet.

A test that fails on its second half says that the private name can go.
"""

import functools
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fsdp_sft
from tests.harness.models import tiny_model


class _Compat(SimpleNamespace):
    """Every name of the room, whichever of its files has it."""

    def __init__(self) -> None:
        super().__init__()
        for file in sorted((Path(fsdp_sft.__file__).parent / "_compat").glob("[a-z]*.py")):
            own = vars(importlib.import_module(f"fsdp_sft._compat.{file.stem}"))
            vars(self).update({name: value for name, value in own.items() if not name.startswith("__")})


_compat: Any = _Compat()

# (function of _compat, module that has the private name, the name, where a public form would be expected)
PRIVATE = [
    (
        "forget_meshes",
        "torch.distributed.tensor._collective_utils",
        "MeshTopoInfo",
        "torch.distributed.tensor",
    ),
    (
        "forget_meshes",
        "torch.distributed.tensor.debug",
        "_clear_sharding_prop_cache",
        "torch.distributed.tensor",
    ),
    (
        "split_factor_of",
        "torch.distributed.tensor.placement_types",
        "_StridedShard",
        "torch.distributed.tensor",
    ),
    (
        "place_experts_on",
        "transformers.distributed.expert_parallel",
        "apply_expert_parallelism",
        "transformers.distributed",
    ),
    (
        "exchange_rows",
        "torch.distributed._functional_collectives",
        "all_to_all_single_autograd",
        "torch.distributed",
    ),
    (
        "keep_rows_apart",
        "transformers.masking_utils",
        "packed_sequence_mask_function",
        "transformers",
    ),
    ("default_store", "torch.distributed.distributed_c10d", "_get_default_store", "torch.distributed"),
    (
        "render_chat",
        "transformers.utils.chat_template_utils",
        "render_jinja_template",
        "transformers",
    ),
    (
        "revert_weight_conversion",
        "transformers.core_model_loading",
        "revert_weight_conversion",
        "transformers",
    ),
    ("match_checkpoint_keys", "transformers.core_model_loading", "rename_source_key", "transformers"),
    ("match_checkpoint_keys", "transformers.core_model_loading", "dot_natural_key", "transformers"),
    ("match_checkpoint_keys", "transformers.core_model_loading", "WeightRenaming", "transformers"),
    (
        "weight_conversions",
        "transformers.conversion_mapping",
        "get_model_conversion_mapping",
        "transformers",
    ),
    (
        "_without_quantiser",
        "transformers.conversion_mapping",
        "get_model_conversion_mapping",
        "transformers",
    ),
    ("_without_quantiser", "transformers.core_model_loading", "PrefixChange", "transformers"),
    ("build_like_from_pretrained", "transformers.monkey_patching", "patch_output_recorders", "transformers"),
]


@pytest.mark.parametrize(("user", "module", "name", "public"), PRIVATE, ids=lambda value: str(value))
def test_a_private_name_is_there_and_not_public_yet(user: str, module: str, name: str, public: str) -> None:
    assert name in inspect.getsource(getattr(_compat, user)), f"{user} no longer uses {name}: drop this line"
    assert hasattr(importlib.import_module(module), name)
    is_public = name.lstrip("_") in dir(importlib.import_module(public))
    assert not is_public, f"{public}.{name.lstrip('_')} is public now: use it in {user} and drop this line"


ATTRIBUTES = {
    "keep_in_float32_patterns": ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"],
    "names_left_out_on_save": ["_keys_to_ignore_on_save", "_tied_weights_keys"],
    "ignored_on_load": ["_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"],
}


@pytest.mark.parametrize("user", ATTRIBUTES)
def test_class_attributes_are_there_and_have_no_public_reader(user: str) -> None:
    from transformers import PreTrainedModel

    source = inspect.getsource(getattr(_compat, user))
    for name in ATTRIBUTES[user]:
        assert name in source
        assert hasattr(PreTrainedModel, name)
        assert not hasattr(PreTrainedModel, name.lstrip("_")), f"{name.lstrip('_')} is public now: use it"


def test_methods_of_models_that_from_pretrained_uses() -> None:
    model = tiny_model("qwen2-tied")
    for name in ("_get_dtype_plan", "all_tied_weights_keys", "tie_weights", "initialize_weights"):
        assert hasattr(model, name), name
    assert "recompute_mapping" in inspect.signature(model.tie_weights).parameters
    assert hasattr(model, "named_non_persistent_buffers")
    assert next(iter(inspect.signature(type(model).get_init_context).parameters)) == "dtype"
    assert "_is_hf_initialized" in inspect.getsource(importlib.import_module("transformers.initialization"))


def test_tensors_of_a_module_can_be_replaced_only_through_a_private_method() -> None:
    module = nn.Linear(2, 2)
    _compat.apply_to_tensors(module, lambda tensor: tensor.double())
    assert module.weight.dtype == torch.float64
    assert not hasattr(nn.Module, "apply_to_tensors"), "torch has a public form now"


def test_plans_of_experts_have_no_public_expansion() -> None:
    model = tiny_model("mixtral", num_hidden_layers=2)
    experts = {f"model.layers.{index}.mlp.experts": 4 for index in range(2)}
    assert _compat.experts_to_place(model) == experts
    assert _compat.experts_to_place(tiny_model("llama")) == {}
    assert not hasattr(model, "expand_parallel_plan"), "transformers has a public name now"


def test_ways_to_compute_experts_have_no_public_reader() -> None:
    import transformers
    from transformers.integrations import moe

    model = tiny_model("mixtral", num_hidden_layers=1)
    (experts,) = _compat.switchable_experts(model).values()
    assert _compat.switchable_experts(tiny_model("llama")) == {}
    assert _compat.experts_implementation_of(experts) == "grouped_mm"
    assert _compat.experts_forward(experts, "grouped_mm") is moe.grouped_mm_experts_forward
    assert "ALL_EXPERTS_FUNCTIONS" not in dir(transformers), "transformers has a public name now"
    assert not hasattr(model.config, "experts_implementation"), "transformers has a public reader now"


def test_wrapper_subclasses_have_no_public_constructor() -> None:
    assert hasattr(torch.Tensor, "_make_wrapper_subclass")
    assert not hasattr(torch.Tensor, "make_wrapper_subclass"), "torch has a public form now"


def test_the_base_class_of_dispatch_modes_has_no_public_module() -> None:
    assert issubclass(_compat.TorchDispatchMode, object)
    assert not hasattr(torch.utils, "TorchDispatchMode"), "torch has a public name now"
    assert not hasattr(torch.overrides, "TorchDispatchMode"), "torch has a public name now"


def test_how_a_model_computes_has_no_public_reader() -> None:
    from torch.distributed.fsdp import FSDPModule

    model = tiny_model("llama", attn_implementation="eager")
    assert _compat.attention_of(model) == "eager"
    assert not hasattr(model.config, "attn_implementation"), "transformers has a public name now"
    assert _compat.compute_dtypes(model) == {torch.float32}
    assert not hasattr(FSDPModule, "mp_policy"), "torch has a public name now"


def test_whether_a_module_is_compiled_has_no_public_reader() -> None:
    module = nn.Linear(2, 2)
    assert not _compat.is_compiled(module)
    assert _compat.is_compiled(torch.compile(module, backend="eager"))
    module.compile(backend="eager")
    assert _compat.is_compiled(module)
    assert not hasattr(nn.Module, "is_compiled"), "torch has a public name now"


def test_which_module_is_being_traced_has_no_public_reader() -> None:
    import torch.fx.traceback

    assert _compat.modules_being_traced() == []
    assert not hasattr(torch.fx.traceback, "get_nn_module_stack"), "torch has a public name now"
    seen: list[list[str]] = []

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        seen.append(_compat.modules_being_traced())
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU())])

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model[0], x, use_reentrant=False, context_fn=contexts)

    torch.compile(run, backend="aot_eager", fullgraph=True)(torch.ones(1, 2)).sum().backward()
    assert any(path.endswith(".0.0") for path in sum(seen, [])), seen


def test_a_layer_of_transformers_reads_its_checkpoint_function_from_a_private_attribute() -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    layer = Layer().train()
    calls: list[int] = []

    def recompute(function: object, *args: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return function(*args)  # type: ignore[operator,no-any-return]

    for name, value in _compat.checkpointing_flag(recompute).items():
        setattr(layer, name, value)
    assert float(layer(torch.zeros(()))) == 1
    assert calls == [1]
    assert not hasattr(layer, "gradient_checkpointing_func"), "transformers has a public name now"


def test_what_an_operator_does_has_no_public_reader() -> None:
    aten = torch.ops.aten
    assert _compat.changes_its_inputs(aten.add_.Tensor)
    assert not _compat.changes_its_inputs(aten.mm.default)
    attention = aten._scaled_dot_product_flash_attention.default
    assert _compat.draws_random_numbers_now(attention, (1, 2, 3, 0.1), {})
    assert not _compat.draws_random_numbers_now(attention, (1, 2, 3, 0.0), {})
    assert not _compat.draws_random_numbers_now(attention, (1, 2, 3), {})
    assert _compat.draws_random_numbers_now(aten.native_dropout.default, (), {})
    assert not _compat.draws_random_numbers_now(aten.mm.default, (), {})
    assert not hasattr(torch._ops.OpOverload, "schema"), "torch has a public name now"


def test_what_a_scaler_found_has_no_public_reader() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for gradient, found in ((1.0, 0.0), (float("inf"), 1.0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))  # before which a scaler knows no device
        parameter.grad = torch.full((3,), gradient)
        scaler.unscale_(optimizer)
        assert [float(flag) for flag in _compat.found_infs(scaler, [optimizer])] == [found]
    assert not hasattr(torch.amp.GradScaler, "found_inf"), "torch has a public reader now"


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
        seen.append((_compat.being_compiled(), checkpoint._is_compiling(None, (), {})))
        return x + 1

    assert not _compat.being_compiled()
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
