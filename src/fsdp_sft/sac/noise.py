"""Whether a model's training forward draws random numbers, which a recomputation must then repeat."""

from typing import Any

from torch import nn


def draws_random_numbers(model: nn.Module) -> bool:
    """Whether a training forward can draw random numbers: it has a positive dropout, drop path or jitter."""
    return any(
        _is_noise(name, value)
        for module in model.modules()
        for name, value in [*vars(module).items(), *_config_items(module)]
    ) or any(_is_dropout(module) for module in model.modules())


def _is_noise(name: str, value: Any) -> bool:
    """Whether an attribute is a positive rate of dropout or jitter, judged by its name."""
    # layerdrop, which skips whole layers, counts too: it is drawn in Python, but from torch's generator.
    noisy = "drop" in name or "jitter" in name
    return noisy and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _config_items(module: nn.Module) -> list[tuple[str, Any]]:
    """Names and values of a module's config; empty without one."""
    config = getattr(module, "config", None)
    return list(vars(config).items()) if config is not None and hasattr(config, "__dict__") else []


def _is_dropout(module: nn.Module) -> bool:
    """Whether a module is a dropout with a positive rate."""
    # torch's dropout modules have only a private base in common, but all have p and "dropout" in their name.
    return "dropout" in type(module).__name__.lower() and getattr(module, "p", 0) > 0
