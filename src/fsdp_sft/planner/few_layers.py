"""A model of few layers, one of each kind, and a small vocabulary: enough to be measured and tried."""

import copy
import math
from typing import Any

import torch

from fsdp_sft._quantised.settings import without_settings
from fsdp_sft.planner.model import build_model, decoder_blocks, likeness

_SMALL_VOCABULARY = 1024
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")
_LEAST, _MOST = 2, 8  # layers
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token")


def shortened(config: Any, layers: int) -> Any:
    """A copy of a config with its first layers, a small vocabulary and no quantisation.

    It is that of the text decoder where transformers has a model of that alone, otherwise the whole with the
    decoder shortened.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    whole = copy.deepcopy(config)
    without_settings(whole)
    text = whole.get_text_config(decoder=True)
    if text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        whole = text
    whole.use_cache = text.use_cache = False
    total = text.num_hidden_layers
    if layers < total:
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == total:  # an entry for each layer
                setattr(text, name, value[:layers])
        if getattr(text, "num_kv_shared_layers", None):  # of the last layers
            text.num_kv_shared_layers = 0
        text.num_hidden_layers = layers
    if text.vocab_size > _SMALL_VOCABULARY:
        text.vocab_size = _SMALL_VOCABULARY
        for name in _SPECIAL:
            if getattr(text, name, None) is not None:  # some configs take no None
                setattr(text, name, 0)
    return whole


def of_each_kind(config: Any) -> Any:
    """A copy of a config with its first layers, up to the first of each kind, as ``shortened`` makes it.

    Mixtures may begin with dense layers, and only every fourth or sixth layer may have full attention. There
    are two layers at least, and eight at most: two if all of those are of different kinds.
    """
    blocks = decoder_blocks(build_model(shortened(config, _MOST), torch.float32)).values()
    kinds = list(map(likeness, blocks))
    first = {kinds.index(kind) for kind in kinds}
    return shortened(config, _LEAST if len(first) == len(kinds) else max(_LEAST, max(first) + 1))


def with_fewer_experts(config: Any, ranks: int) -> Any:
    """A copy of a config with as few experts as leave its router a choice, and divide among ``ranks``."""
    found = copy.deepcopy(config)
    text = found.get_text_config(decoder=True)
    groups, chosen_groups = (int(getattr(text, name, None) or 1) for name in ("n_group", "topk_group"))
    chosen = next(filter(None, (getattr(text, name, None) for name in _CHOSEN)), None)
    if not isinstance(chosen, int):
        return found
    for name in _EXPERTS:
        number = vars(text).get(name)
        if isinstance(number, int):
            least = 2 * max(chosen * groups // chosen_groups, groups)
            while number % 2 == 0 and number // 2 >= least and number // 2 % math.lcm(ranks, groups) == 0:
                number //= 2
            setattr(text, name, number)
    return found
