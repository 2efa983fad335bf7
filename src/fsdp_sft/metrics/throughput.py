"""Tokens per second and MFU over the last steps, FLOPs of a model, and the peak rates of known GPUs."""

from __future__ import annotations

import copy
import logging
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from fsdp_sft._compat.modules import TorchDispatchMode
from fsdp_sft._process.devices import device_name, resolve_device, synchronize
from fsdp_sft._process.gpus import known_device
from fsdp_sft._ranks.agree import tell

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_logger = logging.getLogger(__name__)
# Tokens of the shorter of two forwards: a multiple of the chunks in which linear attention computes.
_LENGTH = 256
# Classes whose recurrence is elementwise, or a kernel of its own, in which the counter sees no matmul.
_SCANS = re.compile("Mamba|SSM|Rwkv|Recurrent|DeltaNet|LinearAttention|Lightning|LSTM", re.IGNORECASE)


class ThroughputMeter:
    """Tokens per second, TFLOP/s, MFU and the shares of time spent waiting over the last optimizer steps.

    Time is wall-clock time between calls of `update`. The device is not synchronised, since over several
    steps the host cannot run ahead of it by much. Each rank may have a meter: given the global number of
    tokens, all of them report the same, up to jitter.

    Args:
        world_size: Number of ranks that share the tokens, >= 1.
        flops_per_token: Training FLOPs per token (see `model_flops_per_token`); None leaves TFLOP/s and MFU
            None.
        device: Device whose peak MFU refers to; None means the current accelerator if there is one, otherwise
            the CPU.
        peak_flops: Peak of one device in FLOP/s; None takes that of `peak_flops_per_second`.
        averaged_steps: Optimizer steps to average over, >= 1.
        warmup_steps: First steps that are left out (compilation, allocation, first read), >= 0. The first
            step starts when the meter is made.
        clock: Monotonic function that returns seconds; for tests.

    Example:
        >>> ticks = iter([0.0, 5.0, 7.0, 9.0])
        >>> meter = fs.ThroughputMeter(world_size=2, device="cpu", clock=lambda: next(ticks))
        >>> for _ in range(3):
        ...     meter.update(num_tokens=1000)
        >>> meter.stats()["tokens_per_second_per_gpu"]
        250.0
    """

    def __init__(
        self,
        *,
        world_size: int,
        flops_per_token: int | None = None,
        device: torch.device | str | int | None = None,
        peak_flops: float | None = None,
        averaged_steps: int = 20,
        warmup_steps: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = resolve_device(device)
        self._world_size = world_size
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops_per_second(self._device) if peak_flops is None else peak_flops
        self._warmup_left = warmup_steps
        # Of each step the tokens of all ranks, its seconds without pauses, what of them this rank waited for
        # its loader ("data") and for other ranks ("ranks"), and the seconds of pauses.
        self._steps: deque[dict[str, float]] = deque(maxlen=averaged_steps)
        self._clock = clock
        self._pause_depth = 0
        self._spent: dict[str, float] = defaultdict(float)  # seconds of this step, by what they went on
        self._last = clock()

    def update(self, *, num_tokens: int) -> None:
        """Count one optimizer step, at its end.

        Args:
            num_tokens: Tokens of the step over all ranks and micro-batches, >= 0.

        Raises:
            RuntimeError: Called inside `paused()`, whose time would then be missing.
        """
        if self._pause_depth:
            raise RuntimeError("update() was called inside paused(); leave the pause before the next step")
        now = self._clock()
        step = {"tokens": num_tokens, "seconds": now - self._last - self._spent["paused"], **self._spent}
        self._last = now
        self._spent.clear()
        if self._warmup_left:
            self._warmup_left -= 1
        else:
            self._steps.append(step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from the current step, for evaluation and saving. May be nested.

        An accelerator is synchronised on entry and exit, so that training work still queued is counted and
        work queued inside is not.
        """
        self._pause_depth += 1
        start = self._now_when_idle() if self._pause_depth == 1 else 0.0
        try:
            yield
        finally:
            if self._pause_depth == 1:
                self._spent["paused"] += self._now_when_idle() - start
            self._pause_depth -= 1

    def stats(self) -> dict[str, float | None]:
        """Means over the steps that are averaged, ready for `MetricLogger.log`.

        Returns:
            `tokens_per_second` (all ranks), `tokens_per_second_per_gpu`, `step_seconds`, `last_step_seconds`
            (of the last step alone), `tflops_per_gpu` (1e12 FLOP/s), `mfu` (fraction of the peak, 0 to 1),
            `data_wait_share` and `rank_wait_share` (fractions of this rank's step time, 0 to 1: in the
            loader, and until the other ranks had their batches) and `paused_share` (fraction of
            this rank's whole time that was inside `paused()`). None where it is not known: all before the
            first measured step; the FLOP rates without `flops_per_token`; `mfu` without a known peak;
            `data_wait_share` and `rank_wait_share` unless `windows` has the meter.
        """
        names = ("tokens", "seconds", "data", "ranks", "paused")
        tokens, seconds, data, ranks, paused = (sum(s.get(name, 0.0) for s in self._steps) for name in names)
        measured, known = seconds > 0, {name for step in self._steps for name in step}
        tokens_per_second = tokens / seconds if measured else None
        per_gpu = None if tokens_per_second is None else tokens_per_second / self._world_size
        flops = None if per_gpu is None or self._flops_per_token is None else per_gpu * self._flops_per_token
        return {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_gpu": per_gpu,
            "step_seconds": seconds / len(self._steps) if measured else None,
            "last_step_seconds": self._steps[-1]["seconds"] if measured else None,
            "tflops_per_gpu": None if flops is None else flops / 1e12,
            "mfu": None if flops is None or self._peak_flops is None else flops / self._peak_flops,
            "data_wait_share": data / seconds if measured and "data" in known else None,
            "rank_wait_share": ranks / seconds if measured and "ranks" in known else None,
            "paused_share": paused / (seconds + paused) if measured else None,
        }

    @contextmanager
    def waiting_for(self, whom: Literal["data", "ranks"]) -> Iterator[None]:
        """Count the time inside as waiting for the loader or for other ranks, as `windows(meter=)` does."""
        start = self._clock()
        try:
            yield
        finally:
            # A pause is left out of the step, and so is the waiting inside it.
            self._spent[whom] += 0.0 if self._pause_depth else self._clock() - start

    def _now_when_idle(self) -> float:
        synchronize(self._device)
        return self._clock()


def model_flops_per_token(config: PreTrainedConfig, seq_length: int) -> int:
    """Training FLOPs per token of a decoder-only language model, from its config alone.

    torch's `FlopCounterMode` counts the matrix products and convolutions of two forwards on the meta device,
    of 256 and 512 tokens, a multiply-add as 2 FLOPs. What a token costs is linear in the length of its row,
    and forward and backward are 3 forwards. Of a transformer this is::

        6 * (active matmul parameters + LM head)
            + sum over layers of 12 * heads * head_dim * context

    Convention: attention is **not** halved for causality, `context` is `seq_length` (the PaLM and nanoGPT
    convention). A layer with a sliding window has `context = min(seq_length, window)`, likewise a chunked
    one. Recomputation by activation checkpointing is not counted, so the rate built on it is MFU, not
    hardware utilisation. For packed sequences, pass the mean document length weighted by tokens, not the row
    length. Not counted: the embedding lookup, norms, activations, rotary embedding, softmax. Of a mixture of
    experts the active ones are counted, with routers and gates. A composite (vision-language) config counts
    as its text decoder alone. Every parameter counts as trained; with frozen weights the true cost is lower.

    State-space models and linear attention count as their plain PyTorch form: elementwise recurrences have no
    FLOPs in it, which rank 0 logs with the names of their classes.

    Args:
        config: A transformers config of a causal language model; no weights are read.
        seq_length: Tokens per sequence, >= 1.

    Returns:
        FLOPs per token. Takes seconds for a model of many layers.

    Raises:
        ValueError: transformers has no causal language model of the config.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(
        ...     hidden_size=4096,
        ...     intermediate_size=14336,
        ...     num_hidden_layers=32,
        ...     num_attention_heads=32,
        ...     num_key_value_heads=8,
        ...     vocab_size=128256,
        ... )
        >>> fs.model_flops_per_token(config, seq_length=4096)
        51470401536

    Source: Chowdhery et al. 2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311; the LM head is counted
    as in Narayanan et al. 2021 (Megatron-LM), appendix, https://arxiv.org/abs/2104.04473.
    """
    text = copy.deepcopy(config.get_text_config(decoder=True))
    by_module = _linear_in_length(text, config)
    fixed, growth = by_module["Global"]
    total = fixed + growth * seq_length
    for name, (_, growth) in by_module.items():
        layer = re.fullmatch(r"\w+(\.\w+){0,2}\.(layers|h|blocks)\.(\d+)", name)
        if layer is not None:
            total -= growth * (seq_length - _context(text, int(layer[3]), seq_length))
    return round(3 * total)


def peak_flops_per_second(device: torch.device | str | int | None = None) -> float | None:
    """Dense bf16 peak of a GPU, by its name.

    Args:
        device: An accelerator, or an index of one; None means the current one if there is one, otherwise the
            CPU.

    Returns:
        FLOP/s without structured sparsity, or None where it is not known: a CPU, a GPU that is not in the
        table, a MIG slice.

    Example:
        >>> fs.peak_flops_per_second("cuda:0")  # doctest: +SKIP
        989400000000000.0
        >>> fs.peak_flops_per_second("cpu") is None
        True
    """
    name = device_name(resolve_device(device))
    known = None if name is None else known_device(name)
    return None if known is None else known.flops_per_second


def _linear_in_length(text: PreTrainedConfig, whole: PreTrainedConfig) -> dict[str, tuple[float, float]]:
    """FLOPs of a token's forward in each module, as (a, b) of a + b * length; "Global" is the whole model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    with torch.device("meta"):
        # The counter has formulas for the matmuls of "eager", and "batched_mm" runs the active experts alone.
        try:
            model = AutoModelForCausalLM.from_config(text, attn_implementation="eager")
        except ValueError:  # a decoder that transformers has within its composite alone, as Qwen-VL's
            model = AutoModelForImageTextToText.from_config(whole, attn_implementation="eager")
    model.set_experts_implementation("batched_mm")
    scans = {type(part).__name__ for part in model.modules() if _SCANS.search(type(part).__name__)}
    if scans:
        tell(
            _logger,
            "FLOPs of %s: its matrix products alone are counted, not the elementwise recurrence",
            ", ".join(sorted(scans)),
        )
    near, far = _counted(model, _LENGTH), _counted(model, 2 * _LENGTH)
    growth = {name: (far[name] - near[name]) / _LENGTH for name in near}
    return {name: (near[name] - growth[name] * _LENGTH, growth[name]) for name in near}


def _counted(model: Any, length: int) -> dict[str, float]:
    """FLOPs of a token's forward in each module, in a row of so many tokens."""
    ids = torch.zeros((1, length), dtype=torch.int64, device="meta")
    with torch.no_grad(), _Valueless(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    return {name: sum(of.values()) / length for name, of in counter.get_flop_counts().items()}


class _Valueless(TorchDispatchMode):
    """Answers True, or 1, to a forward that asks a meta tensor for its value: whether a mask is all ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        return func(*args, **(kwargs or {}))


def _context(text: PreTrainedConfig, layer: int, seq_length: int) -> int:
    """Number of keys that a query of this layer counts as attending to."""
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    kind = kinds[layer] if kinds else ("sliding_attention" if window else "full_attention")
    fields = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    limit = getattr(text, fields.get(kind, ""), None)
    return min(seq_length, int(limit or seq_length))
