"""The parts that ``load_pretrained`` calls, one after the other, with all that they take."""

from collections.abc import Mapping
from typing import Any

import torch

import fsdp_sft as fs


def composed(
    path: Any,
    *,
    mesh: Any,
    master_dtype: torch.dtype = torch.float32,
    frozen_dtype: torch.dtype | None = None,
    sac_ratio: Any = 0,
    sac: Mapping[str, Any] | None = None,
    compile: bool = False,  # noqa: A002
    peft_config: Any = None,
    adapter_seed: int = 0,
    config_overrides: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A loaded model, with the keywords of ``load_pretrained`` and those of its parts.

    Args:
        sac: Further keywords of ``apply_sac``.
        config_overrides: Fields of the config, for ``build_meta_model``.
        options: Keywords of ``build_meta_model``, ``shard_model`` and ``load_weights``.
    """
    build, shard, load = (
        {name: options.pop(name) for name in names if name in options}
        for names in (
            ("revision", "attn_implementation", "trust_remote_code", "new_vocab_size"),
            ("mp_policy", "reshard_after_forward", "offload_policy", "ep_size"),
            ("missing", "unexpected"),
        )
    )
    assert not options, options
    build = {"dtype": master_dtype, **build, **(config_overrides or {})}
    model: Any = fs.build_meta_model(path, **build)
    if peft_config is not None:
        model = fs.add_adapters(model, peft_config, seed=adapter_seed)
        policy = shard.get("mp_policy")
        compute = torch.bfloat16 if policy is None else policy.param_dtype
        frozen_dtype = compute if frozen_dtype is None else frozen_dtype
    if sac_ratio:
        fs.apply_sac(model, sac_ratio, **(sac or {}))
    if compile:
        fs.compile_blocks(model)
    fs.shard_model(model, mesh=mesh, master_dtype=master_dtype, frozen_dtype=frozen_dtype, **shard)
    model.load_report = fs.load_weights(model, path, **load)
    return model.train()
