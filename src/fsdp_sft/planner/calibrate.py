"""Measure what a real block keeps for its backward on the device at hand, and correct an estimate by it."""

import copy
import gc
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_sft._model.named import tensors_in
from fsdp_sft._process.devices import device_name, resolve_device
from fsdp_sft._process.gpus import gpu_named
from fsdp_sft.planner.estimate import MemoryEstimate
from fsdp_sft.planner.few_layers import of_each_kind, shortened
from fsdp_sft.planner.model import auto_class, build_skeleton, decoder_blocks
from fsdp_sft.planner.replay import KEPT
from fsdp_sft.planner.setup import Setup
from fsdp_sft.planner.trace import trace

_CPU_TOKENS = 512  # activations grow with the tokens, so a short sequence tells as much as a long one


@dataclass(frozen=True)
class Calibration:
    """What real blocks kept for their backward, and what the planner says they keep.

    Attributes:
        device: Name of the device that measured it.
        measured_bytes: Mean of the bytes that each block kept.
        estimated_bytes: The same according to the planner, for the same device and sizes.
        seq_length: Tokens of the one sequence that was run.
        blocks: Number of blocks that were run.
    """

    device: str
    measured_bytes: int
    estimated_bytes: int
    seq_length: int
    blocks: int

    @property
    def factor(self) -> float:
        """Measured over estimated."""
        return self.measured_bytes / self.estimated_bytes

    def refine(self, estimate: MemoryEstimate) -> MemoryEstimate:
        """An estimate whose kept activations are scaled by ``factor``."""
        kept = estimate.breakdown.get(KEPT, 0)
        change = round(kept * (self.factor - 1))
        note = f"kept activations scaled by {self.factor:.3f}, measured on {self.device}"
        return replace(
            estimate,
            peak_bytes=estimate.peak_bytes + change,
            breakdown={**estimate.breakdown, **({KEPT: kept + change} if kept else {})},
            activation_bytes=round(estimate.activation_bytes * self.factor),
            notes=(*estimate.notes, note),
        )


def calibrate(config: Any, setup: Setup, *, blocks: int | None = None) -> Calibration:
    """Run one forward of a few of the config's blocks, with random weights and a small vocabulary.

    Args:
        config: The config, as ``estimate_memory`` takes it.
        setup: The setup to calibrate. On a CPU the sequence is cut to 512 tokens.
        blocks: Number of blocks to run, taken from the front. None runs up to the first of each kind: at
            least 2, at most 8.

    Memory: those blocks' parameters and activations, on the accelerator if there is one.
    """
    device = resolve_device(None)
    on_gpu = device.type != "cpu"
    short = of_each_kind(config) if blocks is None else shortened(config, blocks)
    seq_length = setup.tokens_per_rank if on_gpu else min(setup.tokens_per_rank, _CPU_TOKENS)
    here = replace(
        setup,
        num_gpus=1,
        dp_replicate=1,
        cp=1,
        micro_batch_size=1,
        seq_length=seq_length,
        compile=False,
        trainable=None,
        lora_rank=0,
        packed=None,
        loss_impl="logits",
        logits_dtype=setup.param_dtype,
        device=setup.device if on_gpu else gpu_named("cpu"),
    )
    skeleton = build_skeleton(short, here)
    seen = trace(skeleton, here)
    estimated = sum(seen.blocks[kind].saved for kind in skeleton.kinds)
    measured = saved_bytes_of_blocks(
        short, device, seq_length, dtype=setup.param_dtype, padded=setup.attention_mask
    )
    count = len(skeleton.blocks)
    return Calibration(
        (device_name(device) or device.type) if on_gpu else "this CPU",
        measured // count,
        estimated // count,
        seq_length,
        count,
    )


def saved_bytes_of_blocks(
    config: Any,
    device: torch.device,
    seq_length: int,
    *,
    dtype: torch.dtype,
    padded: bool,
) -> int:
    """Bytes that a real model's blocks save for their backward.

    Each storage counts once. Parameters and the arguments of a block do not count.
    """
    with torch.device(device):
        model = auto_class(config).from_config(copy.deepcopy(config), dtype=dtype).train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    running: list[int] = []
    given: set[int] = set()
    saved: dict[tuple[int, int], int] = {}

    def enter(index: int, args: Any, kwargs: Any) -> None:
        running.append(index)
        hidden = args[0] if args else kwargs["hidden_states"]
        given.update(t.untyped_storage().data_ptr() for t in [hidden, *tensors_in(kwargs)])

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # Called by autograd for each tensor that an operation saves.
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if running and address not in parameters and address not in given:
            saved[(running[-1], address)] = storage.nbytes()
        return tensor

    for index, block in enumerate(decoder_blocks(model).values()):
        block.register_forward_pre_hook(
            lambda _, args, kwargs, index=index: enter(index, args, kwargs), with_kwargs=True
        )
        block.register_forward_hook(lambda _, __, ___: running.clear())
    ids = torch.randint(config.get_text_config(decoder=True).vocab_size, (1, seq_length), device=device)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0  # a mask of ones alone would be left out by transformers
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=ids, attention_mask=mask if padded else None, use_cache=False)
    total = sum(saved.values())
    del output, model
    gc.collect()
    return total
