"""A few layers of the model, trained by this library on all ranks, and by plain torch on one."""

import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_sft._model.adapters import add_adapters
from fsdp_sft._model.blocks import decoder_blocks
from fsdp_sft._process.generators import unmoved
from fsdp_sft._quantised.settings import without_settings
from fsdp_sft._ranks.agree import agreed, through_rank_0
from fsdp_sft._ranks.mesh import data_parallel_place
from fsdp_sft._tensors.gather import Gatherer
from fsdp_sft.check import CheckedJob, Found, Problem
from fsdp_sft.dcp_io import load_checkpoint, save_checkpoint
from fsdp_sft.loss import prepare_loss
from fsdp_sft.planner.model import auto_class, build_model, likeness
from fsdp_sft.step import train_step
from fsdp_sft.targets import IGNORE_INDEX

_ROWS, _LENGTH = 2, 32  # rows of a rank, tokens of a row
_RATE, _MAX_NORM, _LORA_RANK = 0.5, 1.0, 4
# Loss and gradient norm may be so many times as far from float32 as one process in the same dtype is, and so
# far in any case: in float32 only the order of sums differs, and norms add up more than losses.
_TIMES, _LEAST = 3.0, {torch.float32: (2e-5, 2e-4), torch.bfloat16: (5e-3, 3e-2)}
_WEIGHTS, _CANCELLED = 2e-3, 1e-5  # of how far a weight has moved, of which its own rounding can be a part
_Steps = list[tuple[float, float]]  # loss and gradient norm of each step
_Weights = dict[str, torch.Tensor]

_RANDOM = re.compile(r"(?:^|_)(?:dropout|pdrop|drop|layerdrop|jitter)(?:_|$)")
_SMALL_VOCABULARY = 1024
_TO_ZERO = ("pad_token_id", "bos_token_id", "eos_token_id", "num_kv_shared_layers")
_FEWEST, _MOST = 2, 8  # layers
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token")


def parity(job: CheckedJob) -> Found:
    """Whether a few layers train here as in one process, with a save and a load between two steps."""
    if job.folder is None:
        return "not seen: no folder for files", []
    source = job.folder / "model"
    with agreed("writing a few layers of the model"):
        if job.context.rank == 0:
            _write(job.config, source)
    ids, labels, own = _batches(job)
    batch = {"input_ids": ids[own], "labels": labels[own]}
    ours = {dtype: _trained(job, source, batch, dtype) for dtype in _LEAST}

    def compare(_: list[None]) -> Found:
        try:
            return _compared(job, source, ours, ids, labels)
        except torch.OutOfMemoryError:
            return "not seen: one process has no memory for a few layers", []

    return through_rank_0("comparing with one process", lambda: None, compare)


# --- the layers -------------------------------------------------------------------------------------------


def truncated_config(config: Any | None, *, width: int = 256, experts_by: int = 1) -> Any:
    """A config of the model's first layers, up to the first of each kind, with a small vocabulary.

    Mixtures may begin with dense layers, and only every fourth or sixth layer may have full attention. There
    are two layers at least, and eight at most: two if all of those are of different kinds. There is no
    dropout, no quantisation, and experts are as few as leave the router a choice.

    Args:
        config: A transformers config, which stays as it is; None for a Llama of this width.
        width: Of that Llama.
        experts_by: Number that has to divide the experts of a layer.
    """
    if config is None:
        from transformers import LlamaConfig

        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 7 // 2,
            num_hidden_layers=_FEWEST,
            num_attention_heads=width // 64,
            num_key_value_heads=max(1, width // 256),
        )
    kinds = list(
        map(likeness, decoder_blocks(build_model(_shortened(config, _MOST), torch.float32)).values())
    )
    first = {kinds.index(kind) for kind in kinds}
    short = _shortened(config, _FEWEST if len(first) == len(kinds) else max(_FEWEST, max(first) + 1))
    text = short.get_text_config(decoder=True)
    for name, value in vars(text).items():
        if _RANDOM.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(text, name, 0.0)
    _leave_out_experts(text, experts_by)
    return short


def _shortened(config: Any, layers: int) -> Any:
    """A copy of a config with its first layers; of the text decoder where transformers has a class for it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    whole = copy.deepcopy(config)
    without_settings(whole)
    text = whole.get_text_config(decoder=True)
    whole = text if text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else whole
    whole.use_cache = text.use_cache = False
    total = text.num_hidden_layers
    of_layers = {
        name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == total
    }
    short: dict[str, Any] = {
        **{name: 0 for name in _TO_ZERO if getattr(text, name, None)},
        **{name: value[:layers] for name, value in of_layers.items()},
        "num_hidden_layers": min(layers, total),
        "vocab_size": min(_SMALL_VOCABULARY, text.vocab_size),
    }
    for name, value in short.items():
        setattr(text, name, value)
    return whole


def _leave_out_experts(text: Any, divisor: int) -> None:
    groups, chosen_groups = (int(getattr(text, name, None) or 1) for name in ("n_group", "topk_group"))
    chosen = next(filter(None, (getattr(text, name, None) for name in _CHOSEN)), None)
    for name in _EXPERTS:
        number = vars(text).get(name)
        if isinstance(number, int) and isinstance(chosen, int):
            least = 2 * max(chosen * groups // chosen_groups, groups)
            while number % 2 == 0 and number // 2 >= least and number // 2 % math.lcm(divisor, groups) == 0:
                number //= 2
            setattr(text, name, number)


def _write(config: Any, folder: Path) -> None:
    """Write a checkpoint of a config's model with random weights."""
    with unmoved(seed=0):
        model = auto_class(config).from_config(copy.deepcopy(config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)  # so that gradients depend on the rows; fresh models hardly look at them
    model.save_pretrained(folder)


def _batches(job: CheckedJob) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(ids, labels) of all data-parallel shares, ``(shares, rows, length)``, and the index of this rank's.

    Rows have other numbers of targets.
    """
    own, shares = data_parallel_place(job.mesh)
    vocabulary = job.config.get_text_config(decoder=True).vocab_size
    place = torch.arange(shares * _ROWS * _LENGTH)
    ids = ((place * 7919 + place // _LENGTH * 104729 + 11) % (vocabulary - 3) + 3).view(
        shares, _ROWS, _LENGTH
    )
    labels = ids.clone()
    for index, row in enumerate(labels.view(-1, _LENGTH)):
        row[: 1 + index * 5 % (_LENGTH // 2)] = IGNORE_INDEX
    return ids, labels, own


# --- by this library --------------------------------------------------------------------------------------


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=_LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")


@torch.no_grad()
def adapted(model: Any) -> Any:
    """A model with adapters that have the same values for each dtype, and frozen below them."""
    model = add_adapters(model, _lora())
    for parameter in (p for name, p in model.named_parameters() if "lora_" in name):
        # B would begin at 0, and A have no gradient.
        parameter.copy_(0.1 * torch.arange(parameter.numel()).sin().view_as(parameter))
    return model


def _trained(
    job: CheckedJob, source: Path, batch: dict[str, torch.Tensor], dtype: torch.dtype
) -> tuple[_Steps, _Weights, _Weights]:
    """Two steps, with a save and a load between, and on rank 0 the weights before and after in float32."""
    model = job.sharded(source, dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=_RATE)
    text = model.config.get_text_config(decoder=True)
    routers = any(getattr(text, name, None) for name in ("router_aux_loss_coef", "output_router_logits"))
    prepare_loss(model, router_loss="off" if routers else None)  # both sides have the cross entropy alone
    before = _weights(model, dtype)
    first = train_step(model, [batch], optimizer, max_grad_norm=_MAX_NORM, check=False)
    root = source.parent / f"steps-{dtype}"
    save_checkpoint(root, 1, model=model, optimizer=optimizer)
    with torch.no_grad():
        for parameter in trained:
            parameter.zero_()
    load_checkpoint(root, model=model, optimizer=optimizer)
    second = train_step(model, [batch], optimizer, max_grad_norm=_MAX_NORM, check=False)
    return [(one.loss, one.grad_norm) for one in (first, second)], before, _weights(model, dtype)


def _weights(model: nn.Module, dtype: torch.dtype) -> _Weights:
    """On rank 0 all parameters whole, in host memory; nothing elsewhere, and in other dtypes than float32."""
    gatherer = Gatherer()
    parameters = dict(model.named_parameters()) if dtype == torch.float32 else {}
    wholes = {name: gatherer.gather(parameter, torch.float32) for name, parameter in parameters.items()}
    gatherer.finish("gathering a few layers")
    return {name: whole for name, whole in wholes.items() if whole is not None}


# --- in one process, with nothing of this library in the step ---------------------------------------------


def _plain_model(job: CheckedJob, source: Path, values: _Weights | None, dtype: torch.dtype) -> Any:
    """The whole model on one device, by ``from_pretrained`` or with these values and adapters."""
    model: Any = auto_class(job.config).from_pretrained(source, dtype=dtype)
    if values is not None:
        from peft import get_peft_model

        model = get_peft_model(model, _lora(), autocast_adapter_dtype=False)
        model.load_state_dict(values, strict=False)  # it has buffers too
    return model.to(job.context.device).train()


def _plain(
    job: CheckedJob,
    source: Path,
    values: _Weights | None,
    dtype: torch.dtype,
    ids: torch.Tensor,
    labels: torch.Tensor,
) -> tuple[_Steps, _Weights]:
    """(loss and norm of two steps in one process, the weights after them); a twin computes in ``dtype``."""
    model = _plain_model(job, source, values, torch.float32)
    twin = model if dtype == torch.float32 else _plain_model(job, source, values, dtype)
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    optimizer = torch.optim.SGD([mine for mine, _ in pairs if mine.requires_grad], lr=_RATE)
    steps, count = [], int((labels[..., 1:] != IGNORE_INDEX).sum())
    for _ in range(2):
        twin.zero_grad()
        with torch.no_grad():
            for mine, theirs in pairs:
                theirs.copy_(mine)
        total = 0.0
        for some, targets in zip(
            ids.to(model.device), labels.to(model.device), strict=True
        ):  # a share's rows
            logits = twin(input_ids=some).logits[:, :-1].float().flatten(0, 1)
            loss = F.cross_entropy(
                logits, targets[:, 1:].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            )
            (loss / count).backward()
            total += float(loss.detach())
        for mine, theirs in pairs:
            mine.grad = None if theirs.grad is None else theirs.grad.float()
        steps.append((total / count, float(nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM))))
        optimizer.step()
    return steps, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


# --- both -------------------------------------------------------------------------------------------------


def _compared(
    job: CheckedJob,
    source: Path,
    ours: dict[torch.dtype, tuple[_Steps, _Weights, _Weights]],
    ids: torch.Tensor,
    labels: torch.Tensor,
) -> Found:
    """By how much the first loss of each dtype differs from the plain one, and what differs too much."""
    _, before, after = ours[torch.float32]
    plain = {
        dtype: _plain(job, source, None if job.frozen_dtype is None else before, dtype, ids, labels)
        for dtype in ours
    }
    exact, weights = plain[torch.float32]
    texts = list(_compare_weights(before, after, weights))[:1]  # one says it
    off = []
    for dtype, (steps, _, _) in ours.items():
        name = str(dtype).removeprefix("torch.")
        texts += _compare_steps(name, steps, plain[dtype][0], exact, _LEAST[dtype])
        off.append(f"{name} within {abs(steps[0][0] / exact[0][0] - 1):.1e}")
    said = (
        f"{job.config.get_text_config(decoder=True).num_hidden_layers} layers, {', '.join(off)} of one "
        "process; saved and loaded"
    )
    advice = "do not train like this: see what reductions says, and report it with fsdp-sft env"
    return said, [Problem("fail", (), f"{text}: {advice}") for text in texts]


def _compare_steps(
    dtype: str, ours: _Steps, plain: _Steps, exact: _Steps, least: tuple[float, float]
) -> Iterator[str]:
    """Losses and norms that are further from float32 (``exact``) than rounding explains."""
    for place, name in enumerate(("loss", "gradient norm")):
        # The larger of both steps: in one of them rounding may have made little of a difference.
        off = max(abs(theirs[place] / wide[place] - 1) for theirs, wide in zip(plain, exact, strict=True))
        for number, (mine, theirs, wide) in enumerate(zip(ours, plain, exact, strict=True), start=1):
            if not abs(mine[place] / wide[place] - 1) <= max(_TIMES * off, least[place]):
                text = (
                    f"{name} {mine[place]:.7g} in step {number}, {theirs[place]:.7g} in one process ({dtype})"
                )
                yield f"{text} and {wide[place]:.7g} in float32"


def _compare_weights(before: _Weights, after: _Weights, plain: _Weights) -> Iterator[str]:
    """The weights that are off by more than rounding explains."""
    moves = {name: float((theirs - before[name]).abs().max()) for name, theirs in plain.items()}
    # Some gradients are sums that cancel, such as that of the bias of keys: what is left is rounding.
    nothing = _CANCELLED * max(moves.values())
    for name, theirs in plain.items():
        rounding = float(theirs.abs().max()) * 2.0**-22 + nothing
        apart = float((after[name] - theirs).abs().max())
        if not apart <= _WEIGHTS * moves[name] + rounding:
            yield f"{name} is off by {apart:.1e}; two steps have moved it by {moves[name]:.1e} (float32)"
