"""A few layers of the planned model: which, whether they fit here and are done in time, and their files."""

import copy
import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from fsdp_sft._process.generators import unmoved
from fsdp_sft._process.gpus import GIB
from fsdp_sft._quantised.settings import without_settings
from fsdp_sft._ranks.agree import agreed, all_gather_objects, share
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.pace import all_at_once, seconds_of
from fsdp_sft.planner.model import auto_class, build_model, decoder_blocks, likeness

_RANDOM = re.compile(r"(?:^|_)(?:dropout|pdrop|drop|layerdrop|jitter)(?:_|$)")
_SHARE = 0.5  # of the seconds of all checks, that a few layers may compute
_TOKENS, _TOKENS_A_RANK = 500, 400  # of forwards: on each rank, and on rank 0 for the rows of each
_PRODUCT = (256, 1024)  # rows, and inputs and outputs, by whose rate the seconds are foreseen
# Seconds that are allowed without a sign of life: for the layers, and for their compiling.
_LAYERS, _COMPILING = 60.0, 600.0
_BYTES_PER_SECOND = 1e8  # of a folder whose rate was not measured
_BYTES_MOVED = 200  # for a parameter, by reads and writes of parity, five times over
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


def few_layers(config: Any | None, *, is_fast: bool = False) -> Any:
    """A config of the model's first layers, up to the first of each kind, and a small vocabulary.

    It has no dropout. Without a config it is two layers of one of our own.
    """
    if config is None:
        from transformers import LlamaConfig

        width = 4096 if is_fast else 256
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 7 // 2,
            num_hidden_layers=2,
            num_attention_heads=width // 64,
            num_key_value_heads=max(1, width // 256),
            max_position_embeddings=8192,
            tie_word_embeddings=False,
        )
    short = of_each_kind(config)
    text = short.get_text_config(decoder=True)
    for name, value in vars(text).items():
        if _RANDOM.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(text, name, 0.0)
    return short


def fitting_layers(
    cluster: Cluster, dtype: torch.dtype, *, parameter_bytes: int, room: int | None
) -> tuple[Any, str]:
    """(config of few layers; in words why they cannot be tried here, or "").

    Args:
        cluster: The ranks.
        dtype: Of the computation.
        parameter_bytes: What a parameter takes.
        room: What rank 0 has; None if it is not known. Without the room or the time for a mixture, it has
            fewer experts.

    Collective: all ranks.
    """
    room = share(room)
    rate = _flops_per_second(cluster, dtype)
    full = few_layers(cluster.asked.config, is_fast=cluster.has_own_clock)
    why = ""
    for config in (full, with_fewer_experts(full, cluster.asked.ep_size)):
        need, seconds = parameter_bytes * parameters_of(config), _seconds(cluster, config, rate)
        layers = f"{layers_in(config)} layers of it"
        if room is not None and need > room:
            why = f"{layers} take about {need / GIB:.1f} GiB, and less is free"
        elif seconds > _SHARE * cluster.asked.seconds:
            why = f"{layers} take about {seconds:.0f} s in {str(dtype).removeprefix('torch.')}; try --seconds"
        else:
            return config, ""
    return full, why


def is_in_time(cluster: Cluster, config: Any, dtype: torch.dtype) -> bool:
    """Whether the layers can be tried in this dtype too: some processors have no instructions for it.

    Collective: all ranks.
    """
    return _seconds(cluster, config, _flops_per_second(cluster, dtype)) <= _SHARE * cluster.asked.seconds


def _flops_per_second(cluster: Cluster, dtype: torch.dtype) -> float:
    """What the slowest rank computes beside the others."""
    rows, width = _PRODUCT
    a = torch.ones(rows, width, device=cluster.device, dtype=dtype)
    b = torch.ones(width, width, device=cluster.device, dtype=dtype)

    def measure() -> float:
        seconds = seconds_of(lambda: torch.nn.functional.linear(a, b), cluster.device, at_least=0.02)
        return 2.0 * rows * width * width / seconds

    return float(min(all_gather_objects(all_at_once(measure, "timing a product"))))


def _seconds(cluster: Cluster, config: Any, rate: float) -> float:
    """About what parity computes in a dtype."""
    shares = cluster.world_size // cluster.asked.cp
    return 2.0 * parameters_of(config) * (_TOKENS + _TOKENS_A_RANK * shares) / rate


def layers_in(config: Any) -> int:
    """Number of a config's layers."""
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def parameters_of(config: Any) -> int:
    """Number of parameters of a config's model."""
    return sum(parameter.numel() for parameter in build_model(config, torch.float32).parameters())


def time_for(cluster: Cluster, config: Any) -> AbstractContextManager[None]:
    """Context in which the watchdog allows what a few layers may take, by their files and to be compiled."""
    if cluster.watchdog is None:
        return nullcontext()
    rates = cluster.measured.get("folder") or {"": _BYTES_PER_SECOND}
    moved = _BYTES_MOVED * parameters_of(config) / min(rates.values())
    compiled = _COMPILING if cluster.asked.compile else 0.0
    return cluster.watchdog.phase("a few layers", timeout=(_LAYERS + compiled) * cluster.crowding + moved)


def written(cluster: Cluster, config: Any) -> Path:
    """The folder of a config's model with random weights, as a checkpoint that any rank can read.

    Collective: all ranks.
    """
    assert cluster.folder is not None
    folder = cluster.folder / f"model-{parameters_of(config)}"
    with agreed("writing a few layers of the model"):
        if cluster.rank == 0 and not folder.exists():
            _write(config, folder)
    return folder


def _write(config: Any, folder: Path) -> None:
    with unmoved(seed=0):
        model = auto_class(config).from_config(copy.deepcopy(config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)  # so that gradients depend on the rows; fresh models hardly look at them
    with without_bars():
        model.save_pretrained(folder)


@contextmanager
def without_bars() -> Iterator[None]:
    """Context without transformers' progress bars, between which a table would be lost."""
    from transformers.utils import logging

    had = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had:
            logging.enable_progress_bar()
