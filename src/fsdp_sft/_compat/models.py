"""transformers' model classes: how they are built, tied, initialised, and what they keep in float32."""

import re
from typing import Any

import torch
from torch import nn


def float32_names(model: nn.Module, dtype: torch.dtype) -> re.Pattern[str]:
    """What names contain, as whole components, that transformers keeps in float32 in a model of that dtype.

    It reads that from class attributes that no public function shows, in ``_get_dtype_plan``.
    """
    return re.compile(
        "|".join(
            {
                rf"(?:^|\.){re.escape(pattern)}(?:\.|$)"
                for module in model.modules()
                if hasattr(module, "_get_dtype_plan")
                for pattern in module._get_dtype_plan(dtype)  # type: ignore[operator]
            }
        )
        or "(?!)"
    )


def build_like_from_pretrained(cls: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model on the meta device with untied weights, as ``from_pretrained`` builds it before it reads.

    No public function stops there. ``get_init_context`` is the classmethod that makes the context of the
    build; ``patch_output_recorders`` and ``_get_dtype_plan`` are the two steps after it. Parameters that the
    class keeps in float32 under ``dtype`` are float32. ``config`` is changed: it gets ``dtype``, and the
    model refers to it.
    """
    from transformers.monkey_patching import patch_output_recorders
    from transformers.utils.generic import ContextManagers

    config.dtype = dtype
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            getattr(config, name).dtype = dtype
    with ContextManagers(cls.get_init_context(dtype, False, False, None)):
        model = cls(config)
        patch_output_recorders(model)
    kept = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    if kept:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.is_floating_point() and re.search("|".join(kept), name):
                parameter.data = parameter.data.to(torch.float32)
    return model


def tied_names(model: nn.Module) -> dict[str, str]:
    """The ties of weights that the config asks for, from target name to source name.

    ``all_tied_weights_keys`` is what transformers itself ties by; models from elsewhere do not have it.
    """
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def initialise_computed(twin: nn.Module, missing: set[str]) -> dict[str, torch.Tensor]:
    """Run the model's own initialisation on the CPU for its computed buffers and the missing keys.

    transformers marks tensors that have been loaded by the attribute ``_is_hf_initialized``, and
    ``initialize_weights`` fills all others. Here the marks on the meta tensors of a twin protect all tensors
    but the wanted ones.

    Returns:
        Values of all non-persistent buffers and of ``missing``, by name.
    """
    ties = set(tied_names(twin))
    wanted = {name for name, _ in twin.named_non_persistent_buffers()} | (missing - ties)  # type: ignore[operator]
    for name in wanted:
        parent, _, leaf = name.rpartition(".")
        module = twin.get_submodule(parent)
        empty = torch.empty_like(getattr(module, leaf), device="cpu")
        value = nn.Parameter(empty, empty.is_floating_point()) if leaf in module._parameters else empty
        setattr(module, leaf, value)
    for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
        if name not in wanted:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    twin.initialize_weights()  # type: ignore[operator]
    filled = dict(twin.named_parameters(remove_duplicate=False)) | dict(
        twin.named_buffers(remove_duplicate=False)
    )
    return {name: filled[name].detach() for name in wanted}
