"""Run a model's own forward, with something else in the place of its head.

The model is called as always, so everything between its inputs and its head happens as always: FSDP2's
hooks, mixed precision, checkpointing, compiled blocks. Only the head's ``forward`` is another one for that
call. The head is still called as a module, so a group of its own is gathered before and its gradient reduced
after, and what it returns is the loss, so that FSDP2 hangs its backward hooks on that.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat import is_compiled, original_class
from fsdp_sft.adapters import forward_parameters

HeadForward = Callable[[torch.Tensor], torch.Tensor]


def plain_head(model: nn.Module) -> tuple[nn.Linear | None, str]:
    """The model's head if it is nothing but a linear layer, else None and why not."""
    if is_compiled(model):
        return None, "the model is compiled as a whole (compile_blocks compiles its blocks)"
    get: Any = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if not isinstance(head, nn.Module):
        return None, f"{type(model).__name__} names no output embeddings"
    cls = original_class(head)
    if cls.forward is not nn.Linear.forward or "forward" in vars(head) or is_compiled(head):
        return None, f"its head is not a plain nn.Linear but computes something else ({cls.__name__})"
    others = {name for name, _ in head.named_parameters()} - {"weight", "bias"}
    if others:
        return None, f"its head has parameters of its own: {', '.join(sorted(others))}"
    return head, ""  # type: ignore[return-value]


def loss_at_head(
    model: nn.Module, head: nn.Module, inputs: dict[str, Any], loss_of: HeadForward
) -> torch.Tensor:
    """Call ``model(**inputs)`` and return ``loss_of(hidden)`` for what its head is called with.

    Args:
        model: As it is trained: sharded or not.
        head: Its output embeddings.
        inputs: What its forward takes, without labels.
        loss_of: From hidden states ``(B, S, H)`` to a scalar, with the head's parameters gathered.

    Raises:
        RuntimeError: If the forward does not call its head exactly once.
    """
    losses: list[torch.Tensor] = []
    errors: list[Exception] = []
    forward = model.forward

    def head_forward(hidden: torch.Tensor) -> torch.Tensor:
        try:
            losses.append(loss_of(hidden))
        except Exception as error:  # raised below: one that leaves a forward leaves FSDP2 in the middle of it
            errors.append(error)
            losses.append(hidden.new_zeros(()))
        return losses[-1]

    def model_forward(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return losses[-1] if losses else output

    with replaced_forward(head, head_forward), _no_logits(head), replaced_forward(model, model_forward):
        model(**inputs)
    if errors:
        raise errors[0]
    if len(losses) != 1:
        raise RuntimeError(f"{type(model).__name__} called its head {len(losses)} times in one forward")
    # Not what the call returned: FSDP2 may have cast that to its policy's output_dtype.
    return losses[0]


def takes_use_cache(model: nn.Module) -> bool:
    """Whether the forward has the argument by which transformers' models are told to keep no cache."""
    return "use_cache" in forward_parameters(model)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let ``module(...)`` run ``forward`` between the module's hooks."""
    own = vars(module)
    missing = object()
    before = own.get("forward", missing)
    own["forward"] = forward
    try:
        yield
    finally:
        if before is missing:
            del own["forward"]
        else:
            own["forward"] = before


@contextmanager
def _no_logits(head: nn.Module) -> Iterator[None]:
    """Give the rest of the model's forward logits of an empty vocabulary.

    A hook registered now runs after FSDP2's, which has then seen the loss.
    """

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], _loss: torch.Tensor) -> torch.Tensor:
        return args[0].new_empty((*args[0].shape[:-1], 0))

    handle = head.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
