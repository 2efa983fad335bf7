"""One call from a checkpoint to a sharded, loaded model in train() mode."""

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp_sft._agree import agreed
from fsdp_sft._dtypes import check_dtypes
from fsdp_sft._expert_parallel import check_shareable_experts, share_out
from fsdp_sft.adapters import add_adapters, base_of
from fsdp_sft.sac import Placement, Ratio, apply_sac, parse_ratio
from fsdp_sft.shard import compile_blocks, shard_model
from fsdp_sft.weights import load_weights
from fsdp_sft.weights.hub import resolve_folder
from fsdp_sft.weights.load import Strategy
from fsdp_sft.weights.meta import meta_model

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def load_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    mesh: "DeviceMesh",
    master_dtype: torch.dtype = torch.float32,
    mp_policy: MixedPrecisionPolicy | None = None,
    sac_ratio: Ratio = 0,
    sac_placement: Placement = "even",
    sac_save: str | Iterable[str] | None = None,
    sac_offload: bool = False,
    compile: bool = False,  # noqa: A002  the word that torch uses for it
    revision: str | None = None,
    strategy: Strategy = "auto",
    host_budget_bytes: int = 1 << 30,
    missing: Literal["error", "initialise"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    reshard_after_forward: bool | int = True,
    offload_policy: OffloadPolicy | None = None,
    prefetch: int = 0,
    ep_size: int = 1,
    peft_config: "PeftConfig | None" = None,
    adapter_seed: int = 0,
    frozen_dtype: torch.dtype | None = None,
    new_vocab_size: int | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    check_finite: bool = True,
) -> "PreTrainedModel":
    """Build a checkpoint's model on the meta device, prepare its blocks, shard it, and load it.

    No rank ever holds more than its shards and a bounded buffer.

    Args:
        name_or_path: A folder, or a Hub id.
        mesh: Device mesh from ``build_mesh``.
        master_dtype: Dtype of the stored shards that are trained.
        mp_policy: See ``shard_model``.
        sac_ratio: Fraction of blocks whose activations are recomputed; see ``apply_sac``.
        sac_placement: ``"even"`` or ``"prefix"``; see ``apply_sac``.
        sac_save: Names of submodules whose costly outputs these blocks keep, or ``"sdpa"``; see ``save`` of
            ``apply_sac``.
        sac_offload: Whether the tensors that these blocks keep wait in host memory; see ``apply_sac``.
        compile: Whether to compile each block.
        revision: Branch, tag or commit of a Hub id.
        strategy: See ``load_weights``.
        host_budget_bytes: See ``load_weights``.
        missing: See ``load_weights``.
        unexpected: See ``load_weights``.
        attn_implementation: See ``build_meta_model``.
        trust_remote_code: See ``build_meta_model``.
        allow_pickle: See ``load_weights``.
        reshard_after_forward: See ``shard_model``.
        offload_policy: See ``shard_model``.
        prefetch: See ``shard_model``.
        ep_size: Number of ranks that share out the experts of a mixture (expert parallelism): each has some
            of them whole and reads no others, and tokens travel to the ranks that have their experts. It must
            divide ``dp_shard`` and the number of experts. 1 shards experts like all other parameters, which
            are gathered on the ranks that have the tokens.
        peft_config: Configuration of adapters to train instead of the model; see ``add_adapters``. The result
            is then a ``PeftModel``.
        adapter_seed: Seed of the adapters' initialisation.
        frozen_dtype: Dtype of the stored shards that are frozen; None is the policy's compute dtype with
            adapters and ``master_dtype`` without.
        new_vocab_size: Number of tokens for which the model is to have rows, such as ``len(tokenizer)`` after
            tokens were added to it; a number for which it has rows already changes nothing. See
            ``build_meta_model``.
        config_overrides: Fields of the config to replace, such as ``{"attention_dropout": 0.1}``.
        check_finite: See ``load_weights``.

    Returns:
        The model in ``train()`` mode; ``model.load_report`` is the ``LoadReport``.

    Raises:
        CheckpointFormatError: If the checkpoint is damaged, unsafe or does not fit.
        ValueError: If an argument is out of range.
        TypeError: If the config does not have a field of ``config_overrides``.
        VocabularyError: If rows cannot be added for ``new_vocab_size`` tokens.
        AdapterError: If the adapters can only be initialised from the base weights.
        UnsupportedModelError: If transformers has no plan by which ``ep_size`` ranks share out experts; with
            ``sac_save``, if a part of a block is sharded as a group of its own, as shared out experts are.

    Collective: all ranks of the mesh, which are all ranks of the job.
    Memory: The shards, and the buffers of ``load_weights``.

    Example:
        >>> model = fs.load_pretrained(path, mesh=mesh, sac_ratio="1/2")
        >>> model.training, next(model.parameters()).dtype
        (True, torch.float32)
        >>> model.load_report.loaded[0]
        'model.embed_tokens.weight'
    """
    check_dtypes(master_dtype=master_dtype, frozen_dtype=frozen_dtype)
    folder = resolve_folder(
        name_or_path, revision=revision, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle
    )
    with agreed("building the model"):
        model: Any = meta_model(
            folder,
            dtype=master_dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            new_vocab_size=new_vocab_size,
            config_overrides=config_overrides,
        )
        model.config.name_or_path = model.name_or_path = os.fspath(name_or_path)
        model = prepare_blocks(
            model,
            peft_config=peft_config,
            adapter_seed=adapter_seed,
            sac_ratio=sac_ratio,
            sac_placement=sac_placement,
            sac_save=sac_save,
            sac_offload=sac_offload,
            compile=compile,
        )
        check_shareable_experts(base_of(model), mesh, ep_size)
    share_out(base_of(model), mesh, ep_size)
    shard_model(
        model,
        mesh=mesh,
        master_dtype=master_dtype,
        frozen_dtype=frozen_dtype_of(frozen_dtype, peft_config, mp_policy),
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
        offload_policy=offload_policy,
        prefetch=prefetch,
    )
    report = load_weights(
        model,
        folder,
        strategy=strategy,
        host_budget_bytes=host_budget_bytes,
        missing=missing,
        unexpected=unexpected,
        allow_pickle=allow_pickle,
        check_finite=check_finite,
    )
    model.load_report = report
    return model.train()  # type: ignore[no-any-return]


def prepare_blocks(
    model: Any,
    *,
    peft_config: "PeftConfig | None",
    adapter_seed: int,
    sac_ratio: Ratio,
    sac_placement: Placement,
    sac_save: str | Iterable[str] | None,
    sac_offload: bool,
    compile: bool,  # noqa: A002
) -> Any:
    """Prepare a model on the meta device for sharding: adapters, activation checkpointing, compilation.

    Returns:
        The model, or with adapters the ``PeftModel`` around it.
    """
    if peft_config is not None:
        model = add_adapters(model, peft_config, seed=adapter_seed)
    for name, given in (("sac_offload", sac_offload), ("sac_save", sac_save is not None)):
        if given and not parse_ratio(sac_ratio):
            raise ValueError(f"{name} is for blocks that are recomputed, and sac_ratio is {sac_ratio!r}")
    if sac_ratio:
        apply_sac(model, sac_ratio, placement=sac_placement, save=sac_save, offload=sac_offload)
    if compile:
        compile_blocks(model)
    return model


def frozen_dtype_of(
    frozen_dtype: torch.dtype | None, peft_config: "PeftConfig | None", mp_policy: MixedPrecisionPolicy | None
) -> torch.dtype | None:
    """The dtype in which frozen shards are stored: with adapters the compute dtype, unless one is given."""
    if frozen_dtype is not None or peft_config is None:
        return frozen_dtype
    return mp_policy.param_dtype if mp_policy is not None else torch.bfloat16
