"""transformers' mixtures of experts: their implementations, and their plan for several ranks."""

from typing import Any

from torch import nn


def experts_to_place(model: nn.Module) -> dict[str, int]:
    """The modules whose experts transformers can distribute over ranks: FQN to number of experts.

    The model must be without peft's wrappers around experts. The result is empty if transformers has no
    plan for the model. Only the private ``_expand_parallel_plan`` expands a plan to a
    model's layers.
    """
    expand: Any = getattr(model, "_expand_parallel_plan", dict)
    expanded: dict[str, str] = expand(getattr(model, "ep_plan", None) or {})
    dispatched = [name for name, style in expanded.items() if style == "ep_dispatch_experts"]
    return {name: len(next(model.get_submodule(name).parameters())) for name in dispatched}


def place_experts_on(model: nn.Module, ep_mesh: Any, alone: Any) -> None:
    """Cut each stack of experts down to this rank's, and send tokens between the ranks of ``ep_mesh``.

    ``from_pretrained(distributed_config=...)`` does this to a model on the meta device, but publicly only
    together with transformers' own sharding and loading; hence ``apply_expert_parallelism``.

    Args:
        model: Model on the meta device, not sharded.
        ep_mesh: Mesh of one axis, whose ranks together have all experts.
        alone: Mesh of this rank alone: transformers asks which ranks have the same tokens.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = model._expand_parallel_plan(model.ep_plan)  # type: ignore[operator]
    apply_expert_parallelism(model, ep_mesh, alone, plan, ep_implementation="all_to_all")


def switchable_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of experts, by FQN, that transformers can compute in more than one way.

    Its decorator leaves no public mark, so they are recognised by ``_apply_gate`` and what else it sets.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(type(module), "_apply_gate")
        and all(hasattr(module, mark) for mark in ("has_gate", "is_transposed", "num_experts"))
    }


def experts_implementation_of(experts: nn.Module) -> str:
    """Name of the implementation that a module of experts runs: its config's ``_experts_implementation``."""
    return str(getattr(experts.config, "_experts_implementation", None) or "eager")


def experts_forward(experts: nn.Module, implementation: str) -> Any:
    """The function ``(experts, hidden_states, top_k_index, top_k_weights)`` of an implementation.

    transformers looks it up in ``ALL_EXPERTS_FUNCTIONS`` at each forward, by the name in the config that all
    experts of a model share.

    Raises:
        ValueError: If transformers has no implementation of that name.
    """
    import inspect

    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if implementation == "eager":
        return inspect.unwrap(type(experts).forward)
    if implementation not in ALL_EXPERTS_FUNCTIONS:
        known = ", ".join(map(repr, ("eager", *sorted(ALL_EXPERTS_FUNCTIONS))))
        raise ValueError(f"impl must be 'auto' or one of {known}, got {implementation!r}")
    return ALL_EXPERTS_FUNCTIONS[implementation]
