"""Former keywords of functions: a TypeError says what to write instead."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_COMPOSED = {
    **dict.fromkeys(
        ("sac_placement", "sac_save", "sac_offload"),
        "call build_meta_model, apply_sac (placement=, save=, offload=), shard_model and load_weights",
    ),
    **dict.fromkeys(
        ("offload_policy", "prefetch", "ep_size"),
        "call build_meta_model, shard_model, which takes it, and load_weights",
    ),
    "adapter_seed": "call build_meta_model, add_adapters (seed=), shard_model and load_weights",
    "config_overrides": "call build_meta_model (its keywords set fields), shard_model and load_weights",
}

# By the function's qualified name: its former keywords, with what to do now.
FORMER = {
    "ThroughputMeter.__init__": {"window": "pass averaged_steps="},
    "estimate_memory": dict.fromkeys(
        (
            *("num_gpus", "micro_batch_size", "seq_length", "sac_ratio", "sac_placement", "compile"),
            *("master_dtype", "loss_impl", "attention_mask", "gpu", "grad_accum_steps", "dp_replicate", "cp"),
            *("sac_blocks", "optimizer", "grad_sync", "reshard_after_forward", "cpu_offload", "sac_offload"),
            *("trainable", "lora_rank", "lora_targets", "frozen_dtype", "param_dtype", "reduce_dtype"),
            *("logits_dtype", "chunk_size", "experts_impl", "ep_size"),
        ),
        "call estimate_memory(config, Run(...)), whose field it is",
    ),
    "load_pretrained": {
        **_COMPOSED,
        **dict.fromkeys(
            ("strategy", "host_budget_bytes", "missing", "unexpected", "check_finite"),
            "call build_meta_model, shard_model and load_weights, which takes it",
        ),
        "allow_pickle": "call build_meta_model, shard_model and load_weights; the first and the last take it",
    },
    "load_prepared": _COMPOSED,
    "prepare_experts": {"tokens": "leave it out, nothing is timed"},
    **{
        function: {"mesh": "leave it out, a model knows the mesh that it was sharded on"}
        for function in ("train_step", "evaluate", "causal_lm_loss", "verify_packing")
    },
}


def told_of_former(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a former keyword raises a TypeError that says what to do now; the signature stays."""
    former = FORMER[function.__qualname__]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() & former.keys():
            called = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{called} takes no {name}= any more: {former[name]}")
        return function(*args, **kwargs)

    return checked
