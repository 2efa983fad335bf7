"""Refusal of models whose weights transformers holds packed."""

from torch import nn

from fsdp_sft._quantised.find import METHODS
from fsdp_sft._quantised.settings import IN_16_BITS, settings_of
from fsdp_sft.errors import UnsupportedModelError


def refuse_quantised_model(model: nn.Module) -> None:
    """Refuse a model whose weights transformers holds packed, beside the scales that they need.

    Raises:
        UnsupportedModelError: If the model or one within it is quantised; the message names the format, and
            how to have its weights in 16 or 32 bits.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or not getattr(module, "is_quantized", False):
            continue
        folder = str(getattr(config, "name_or_path", "") or "folder")
        settings = settings_of(folder, config)
        method = settings.method if settings is not None else "of a format without quant_method"
        if method == "gguf" and all(p.is_floating_point() for p in module.parameters()):
            continue  # transformers says so of any model that it read from a GGUF, and dequantised
        way = (
            f"load it with load_pretrained({folder!r}, mesh=mesh), which computes the values of each shard "
            "while it reads, or with build_meta_model, shard_model and load_weights"
        )
        raise UnsupportedModelError(
            f"the weights of this {type(module).__name__} are quantised ({method}), and cannot be cut, "
            f"trained or exported as they are: {way if method in METHODS else IN_16_BITS}"
        )
