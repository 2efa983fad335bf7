"""Separate FSDP2 groups for input embedding and head, where they are not tied.

In the root's group both would stay gathered for the whole step, and their gradients would be reduced through
one buffer: 9.5 GiB in float32 for 248,320 tokens and a width of 5,120 (NVIDIA-NeMo/Automodel#3708). In groups
of their own the embedding is freed after its forward, and is not gathered for its backward, which does not
need it; the head is gathered from its forward to its backward.
"""

import functools
import inspect
import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.fsdp import has_begun
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.shard.names import all_names


def own_vocabulary(
    model: nn.Module, taken: Iterable[nn.Module], kept: Collection[int] = ()
) -> tuple[nn.Module | None, nn.Module | None]:
    """The input embedding and the head of a model, each None if it has to stay in the root's group.

    A module stays there if it shares a parameter, has another name too, lies in another group, computes in
    float32, or if the model may use its weight without calling it, since FSDP2 gathers at a call.

    Args:
        model: The model, without adapters around it.
        taken: Modules that are groups already.
        kept: Ids of parameters that compute in float32.
    """
    names = all_names(model)
    inside = {id(inner) for module in taken for inner in module.modules()}

    def found(getter: str) -> nn.Module | None:
        try:
            module = getattr(model, getter)()
        except (AttributeError, NotImplementedError):
            return None
        if not isinstance(module, nn.Module) or id(module) in inside:
            return None
        own = [id(parameter) for parameter in module.parameters()]
        alone = bool(own) and all(len(names[one]) == 1 and one not in kept for one in own)
        return module if alone and _is_only_called(model, module) else None

    embedding, head = found("get_input_embeddings"), found("get_output_embeddings")
    return embedding, None if head is embedding else head


def needs_weight_in_backward(embedding: nn.Module) -> bool:
    """Whether an embedding's backward may need its weight; that of ``nn.Embedding`` needs the ids alone."""
    return getattr(type(embedding), "forward", None) is not nn.Embedding.forward


def follow_root(model: nn.Module, beside: list[nn.Module]) -> None:
    """Let embedding and head in groups of their own follow the root, as if they were in its group.

    ``model.reshard()`` frees them too: torch's method frees the group of one module only, and after a forward
    without a backward ``zero_grad`` would miss the gradients of their shards. And they are not called before
    the model's first forward: FSDP2 would take them for roots, and refuse the model from then on.
    """
    for name, module in model.named_modules():
        if module in beside:
            # Before FSDP2's own hook, which gathers.
            module.register_forward_pre_hook(functools.partial(_refuse_before_root, name), prepend=True)
    if beside:
        model.__dict__["reshard"] = functools.partial(_reshard, model, *beside)


def _reshard(*modules: Any) -> None:
    """``FSDPModule.reshard`` of the root, and of embedding and head in their own groups."""
    for module in modules:
        type(module).reshard(module)


def _refuse_before_root(name: str, module: nn.Module, _args: Any) -> None:
    if not has_begun(module):
        raise UnsupportedModelError(
            f"{name} was called before the sharded model that it is a part of, and FSDP2 gathers weights "
            "from the model's forward on: call the model; for hidden states, with output_hidden_states=True"
        )


def free_early(embedding: Any) -> None:
    """Free a sharded embedding's weight after its forward; gather it for a backward only if that needs it."""
    embedding.set_unshard_in_backward(needs_weight_in_backward(embedding))
    embedding.register_forward_pre_hook(_free_in_training)


def _free_in_training(embedding: Any, _args: Any) -> None:
    """Keep the weight gathered without gradients: ``generate`` would gather it again for each token."""
    embedding.set_reshard_after_forward(torch.is_grad_enabled(), recurse=False)


def _is_only_called(model: nn.Module, module: nn.Module) -> bool:
    """Whether a module has one name, and no forward of the model uses its parameters as values."""
    names = [name for owner in model.modules() for name, child in owner._modules.items() if child is module]
    if len(names) != 1:
        return False
    used = re.compile(rf"\.{re.escape(names[0])}\.(weight|bias)\b(?!\.(dtype|device|shape|size|ndim)\b)")
    classes = {cls for one in model.modules() for cls in type(one).__mro__}
    return not any(used.search(code) for code in map(_forward_code, classes))


@functools.lru_cache(maxsize=1024)
def _forward_code(cls: type) -> str:
    """The code of a class's forward; "" for one that is not written in Python."""
    forward = vars(cls).get("forward")
    try:
        return inspect.getsource(inspect.unwrap(forward)) if forward is not None else ""
    except (OSError, TypeError):
        return ""
