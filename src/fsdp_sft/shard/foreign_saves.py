"""Other libraries' ways to save or resize a model, of which a sharded one would write or change a part."""

import functools
from collections import OrderedDict
from copy import deepcopy
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sft._model.wrappers import base_of
from fsdp_sft._process.callers import warn_caller
from fsdp_sft.errors import UnsupportedModelError


class _ShardsOfOneRank(OrderedDict[str, Any]):
    """A rank's ``state_dict``, which says so when it is pickled; copied and unpickled it is a plain one."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        warn_caller(
            "these are the shards of one rank, and a file of them is no model: save_full_state_dict, "
            "export_hf or save_checkpoint write the whole one"
        )
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return deepcopy(self._plain(), memo)

    def _plain(self) -> "OrderedDict[str, Any]":
        plain = OrderedDict(self)
        vars(plain).update(vars(self))  # torch's _metadata
        return plain


def refuse_foreign_saves(model: nn.Module, *, shared: bool) -> None:
    """Let methods of transformers and peft refuse what they cannot do with shards, before they write.

    Args:
        model: A model that has just been sharded.
        shared: Whether a rank has less than the whole model.
    """
    for each in {id(one): one for one in (model, base_of(model))}.values():
        for name, instead in _INSTEAD.items():
            if callable(getattr(each, name, None)) and (shared or name != "state_dict"):
                each.__dict__[name] = functools.partial(instead, each)


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
    given = kwargs.get("state_dict")
    if given is None or any(isinstance(value, DTensor) for value in given.values()):
        raise UnsupportedModelError(
            "save_pretrained would write one rank's shards. On all ranks call export_hf(model, folder, "
            "tokenizer=...), or export_adapter(model, folder) for the adapter alone; nothing was written"
        )
    return type(model).save_pretrained(model, *args, **kwargs)


def _push_to_hub(model: Any, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedModelError(
        "push_to_hub would send one rank's shards. Call export_hf(model, folder) on all ranks, and then on "
        "one huggingface_hub.upload_folder(repo_id=..., folder_path=folder); nothing was sent"
    )


def _resize_token_embeddings(model: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
    if new_num_tokens is None:
        return model.get_input_embeddings()
    raise UnsupportedModelError(
        "a sharded model gets no more tokens: build it with new_vocab_size=, which build_meta_model and "
        "load_pretrained take"
    )


def _state_dict(model: Any, *args: Any, **kwargs: Any) -> Any:
    found = type(model).state_dict(model, *args, **kwargs)
    if args or kwargs.get("destination") is not None or kwargs.get("prefix"):
        return found  # as a part of another module's
    own = _ShardsOfOneRank(found)
    vars(own).update(vars(found))
    return own


_INSTEAD = {
    "save_pretrained": _save_pretrained,
    "push_to_hub": _push_to_hub,
    "resize_token_embeddings": _resize_token_embeddings,
    "state_dict": _state_dict,
}
