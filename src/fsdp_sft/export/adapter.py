"""Export of peft adapters without their base model, in peft's own format."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdp_sft._model.published import model_tensors, with_tensors
from fsdp_sft._model.sharded import reshard
from fsdp_sft._ranks.agree import agreed, this_rank
from fsdp_sft._tensors.gather import Gatherer
from fsdp_sft.export.settings import write_chat
from fsdp_sft.export.target import new_folder

if TYPE_CHECKING:
    from peft import PeftModel


def export_adapter(
    model: "PeftModel",
    out_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    chat_template: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the active adapter as ``PeftModel.save_pretrained`` would: weights, configuration, card.

    ``PeftModel.from_pretrained(base_model, out_dir)`` reads the folder, and so do engines that serve adapters
    of a base model. It holds the adapter and the copies of ``modules_to_save``, and appears under its name
    only when it is complete.

    Args:
        model: A peft model, sharded or not.
        out_dir: Folder to make, as in ``export_hf``. ``check_export`` looks at it before training. Rank 0
            writes.
        dtype: Dtype of the adapter's tensors in the file; None keeps the dtypes that they have.
        tokenizer: Tokenizer to save beside the adapter, together with ``generation_config.json``; see
            ``export_hf``.
        chat_template: Chat template with which rows were encoded; see ``export_hf``.
        overwrite: Whether the files of an earlier adapter in ``out_dir`` are replaced; other files stay.

    Returns:
        The folder: ``out_dir``, unless there was a warning.

    Raises:
        TypeError: If the model is not a peft model.
        ValueError: If several adapters are active.
        OSError: If writing fails; raised on all ranks.

    Collective: all ranks.
    Memory: On rank 0 the adapter's full tensors, in CPU memory.

    Example:
        >>> from peft import LoraConfig
        >>> lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        >>> model = fs.load_pretrained(path, mesh=mesh, peft_config=lora)
        >>> folder = fs.export_adapter(model, "adapter")
        >>> sorted(file.name for file in folder.iterdir())
        ['README.md', 'adapter_config.json', 'adapter_model.safetensors']
    """
    model = reshard(model)
    with new_folder(out_dir, overwrite=overwrite) as export:
        with agreed(f"preparing to export to {export.target}"):
            name, wanted = _saved_by_peft(model)
        gatherer = Gatherer()
        gathered = {key: gatherer.gather(tensor, dtype or tensor.dtype) for key, tensor in wanted.items()}
        gatherer.finish(f"gathering the adapter for {export.target}")
        with agreed(f"exporting to {export.target}"):
            if this_rank() == 0:
                _save(model, export.temporary, gathered, name)
                if tokenizer is not None or chat_template is not None:
                    base = model.get_base_model()
                    write_chat(export.temporary, base, model.config, tokenizer, chat_template)
    return Path(export.folder)


def _saved_by_peft(model: "PeftModel") -> tuple[str, dict[str, torch.Tensor]]:
    """The one active adapter, and the tensors that peft would save of it, by name in the model's order."""
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(model, PeftModel):
        raise TypeError(
            f"export_adapter takes a model with peft's adapters, got {type(model).__name__}; export_hf "
            "writes any transformers model"
        )
    active = model.active_adapters
    if len(active) != 1:
        raise ValueError(f"one adapter is exported at a time, and {active} are active; call set_adapter")
    (name,), content = active, model_tensors(model)
    own = {key: content.tensors[first] for key, first in content.names.items()}
    if model.peft_config[name].is_prompt_learning:  # peft saves what its encoder computes
        own_parts = (f"prompt_encoder.{name}.", f".modules_to_save.{name}.")
        return name, {key: own[key] for key in own if any(part in key for part in own_parts)}
    saved = get_peft_model_state_dict(model, own, adapter_name=name, save_embedding_layers=False)
    kept = {id(tensor) for tensor in saved.values()}
    return name, {key: tensor for key, tensor in own.items() if id(tensor) in kept}


def _save(model: "PeftModel", folder: Path, full: dict[str, Any], name: str) -> None:
    """Let peft write the adapter's full tensors, configuration and card."""
    encoders = getattr(model, "prompt_encoder", {})
    own = dict(encoders.items())
    try:
        for key in own.keys() & {name}:
            encoders[key] = with_tensors(own[key], full, f"prompt_encoder.{key}.")
        model.save_pretrained(
            str(folder), selected_adapters=[name], state_dict=full, save_embedding_layers=False
        )
    finally:
        encoders.update(own)
    if name != "default":  # peft puts an adapter of another name into a folder of that name
        for path in (folder / name).iterdir():
            path.rename(folder / path.name)
        (folder / name).rmdir()
