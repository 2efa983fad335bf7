"""One call from a checkpoint to a sharded, loaded model in train() mode."""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_sft._model.adapters import add_adapters
from fsdp_sft._model.towers import freeze_towers as freeze_towers_of
from fsdp_sft._process.dtypes import check_dtypes
from fsdp_sft._process.words import answered
from fsdp_sft._ranks.agree import agreed
from fsdp_sft.sac import Ratio, apply_sac
from fsdp_sft.shard.apply import shard_model
from fsdp_sft.shard.compile import compile_blocks
from fsdp_sft.shard.packing import packed_or_dtype
from fsdp_sft.weights import load_weights
from fsdp_sft.weights.hub import resolve_folder
from fsdp_sft.weights.meta import meta_model

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


@answered
def load_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    mesh: "DeviceMesh",
    master_dtype: torch.dtype = torch.float32,
    frozen_dtype: torch.dtype | str | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    sac_ratio: Ratio = 0,
    compile: bool = False,  # noqa: A002  the word that torch uses for it
    peft_config: "PeftConfig | None" = None,
    new_vocab_size: int | None = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    reshard_after_forward: bool | int = True,
    freeze_towers: bool = True,
) -> "PreTrainedModel":
    """Build a checkpoint's model on the meta device, prepare its blocks, shard it, and load it.

    It calls ``build_meta_model``, ``freeze_towers``, ``add_adapters``, ``apply_sac``, ``compile_blocks``,
    ``shard_model`` and ``load_weights``, in this order. Call these yourself for options that it does not
    take.

    Args:
        name_or_path: A folder, or a Hub id.
        mesh: Device mesh from ``build_mesh``.
        master_dtype: Dtype of the stored shards that are trained.
        frozen_dtype: Dtype of the stored shards that are frozen, or ``"stored"``, ``"nf4"`` or ``"fp8"`` for
            packed ones (see ``shard_model``); None is the policy's compute dtype with
            adapters or frozen towers, and ``master_dtype`` without.
        mp_policy: See ``shard_model``.
        sac_ratio: Fraction of blocks whose activations are recomputed; see ``apply_sac``.
        compile: Whether to compile each block.
        peft_config: Configuration of adapters to train instead of the model; see ``add_adapters``. The result
            is then a ``PeftModel``.
        new_vocab_size: Number of tokens for which the model is to have rows, such as ``len(tokenizer)`` after
            tokens were added to it; a number for which it has rows already changes nothing. See
            ``build_meta_model``.
        revision: Branch, tag or commit of a Hub id.
        attn_implementation: See ``build_meta_model``.
        trust_remote_code: See ``build_meta_model``.
        reshard_after_forward: See ``shard_model``.
        freeze_towers: Whether the vision and audio towers of a multimodal model, which training on text does
            not use, are frozen; see ``freeze_towers``. A model of text alone has none.

    Returns:
        The model in ``train()`` mode; ``model.load_report`` is the ``LoadReport``.

    Raises:
        CheckpointFormatError: If the checkpoint is damaged, unsafe or does not fit.
        ValueError: If an argument is out of range.
        UnsupportedModelError: If rows cannot be added for ``new_vocab_size`` tokens, or the adapters can only
            be initialised from the base weights.

    Collective: all ranks of the mesh, which are all ranks of the job.
    Memory: The shards, and the buffers of ``load_weights``.

    Example:
        >>> model = fs.load_pretrained(path, mesh=mesh, sac_ratio="1/2")
        >>> model.training, next(model.parameters()).dtype
        (True, torch.float32)
        >>> model.load_report.loaded[0]
        'model.embed_tokens.weight'
    """
    check_dtypes(master_dtype=master_dtype)
    packed_or_dtype(frozen_dtype)
    folder = resolve_folder(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    with agreed("building the model"):
        model: Any = meta_model(
            folder,
            called=name_or_path,
            dtype=master_dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            new_vocab_size=new_vocab_size,
        )
        towers = freeze_towers_of(model) if freeze_towers else []
        if peft_config is not None:
            model = add_adapters(model, peft_config)
        if sac_ratio:
            apply_sac(model, sac_ratio)
        if compile:
            compile_blocks(model)
    is_frozen = bool(towers) or peft_config is not None
    shard_model(
        model,
        mesh=mesh,
        master_dtype=master_dtype,
        frozen_dtype=_frozen_dtype(frozen_dtype, is_frozen, mp_policy),
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
    )
    model.load_report = load_weights(model, folder)
    return model.train()  # type: ignore[no-any-return]


def _frozen_dtype(
    frozen_dtype: torch.dtype | str | None, is_frozen: bool, mp_policy: MixedPrecisionPolicy | None
) -> torch.dtype | str | None:
    """The dtype in which frozen shards are stored: if some were frozen, the compute dtype by default."""
    if frozen_dtype is not None or not is_frozen:
        return frozen_dtype
    return mp_policy.param_dtype if mp_policy is not None else torch.bfloat16
