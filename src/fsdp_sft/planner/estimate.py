"""Memory that a training step needs on each GPU, from the config alone, and what a device has for it."""

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_sft._process.gpus import GIB, MIB, Gpu
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.planner.model import CHECKED_FAMILIES, Skeleton, build_skeleton
from fsdp_sft.planner.replay import replay
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.trace import trace

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank in the steady state: tensors that are alive, not what the allocator has reserved.

    Attributes:
        peak_bytes: Most bytes alive during an optimizer step, as ``torch.cuda.max_memory_allocated()`` counts
            them; ``plan_run`` knows how much of a device's memory it may take.
        peak_phase: Phase of that moment: ``"loss"`` (forward, loss, and its backward down to the last block),
            ``"backward"`` (the blocks' backward and the reduction of gradients) or ``"optimizer"``.
        breakdown: Bytes alive at that moment by kind; the values add up to ``peak_bytes``.
        parameters: Number of parameters of the model; tied ones count once.
        active_parameters: Number of parameters that one token passes through; fewer than ``parameters`` for a
            mixture of experts.
        activation_bytes: Bytes that the forward of all blocks leaves on the device for the backward.
        notes: Caveats, such as a family that was never compared with a measurement.
    """

    peak_bytes: int
    peak_phase: str
    breakdown: dict[str, int]
    parameters: int
    active_parameters: int
    activation_bytes: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The breakdown as bars, the largest part first, and the sum."""
        parts = sorted(self.breakdown.items(), key=lambda part: -part[1])
        width = max(map(len, self.breakdown))
        lines = [
            f"{name:<{width}}  {size / GIB:7.2f} GiB  {'█' * round(size / parts[0][1] * 40)}".rstrip()
            for name, size in parts
        ]
        return "\n".join([*lines, f"{'in all':<{width}}  {self.peak_bytes / GIB:7.2f} GiB"])


def estimate_memory(config: "PreTrainedConfig | str | os.PathLike[str]", run: Run) -> MemoryEstimate:
    """Estimate the peak memory per GPU of training a causal language model with this library.

    This needs no weights, process group or GPU. The model is built on the meta device, where one block of
    each kind runs forward and backward to show what it keeps and what it needs while it runs. Then an
    optimizer step is replayed in the order in which FSDP2 allocates and frees.

    Args:
        config: Config of a decoder-only model: a transformers config, a folder or a Hub id.
        run: The way to train it.

    Returns:
        The estimate. Families that were never compared with a measurement carry a note.

    Raises:
        ValueError: If the config is not that of a causal language model, or the model's forward depends on
            values, which the meta device does not have.
        UnsupportedModelError: If the model does not support ``cp``, as far as that shows without weights, or
            transformers has no expert-parallel plan for it.
        TypeError: If ``run`` is not a ``Run``.

    Example:
        >>> from dataclasses import replace
        >>> run = fs.Run(num_gpus=8, micro_batch_size=1, seq_length=4096)
        >>> estimate = fs.estimate_memory(config, run)
        >>> estimate.peak_phase
        'loss'
        >>> sum(estimate.breakdown.values()) == estimate.peak_bytes
        True
        >>> long = replace(run, seq_length=65536, attention_mask=False)
        >>> shared = replace(long, cp=2)
        >>> alone, shared = (
        ...     fs.estimate_memory(config, one).activation_bytes for one in (long, shared)
        ... )
        >>> alone / shared
        2.0
    """
    if not isinstance(run, Run):
        raise TypeError(f"run must be a Run, such as Run(num_gpus=8, ...), got {type(run).__name__}")
    return estimate(build_skeleton(config, run), run)


@functools.lru_cache(maxsize=1024)
def estimate(skeleton: Skeleton, run: Run) -> MemoryEstimate:
    """``estimate_memory`` of a model whose skeleton is that of the run."""
    seen = trace(skeleton, run)
    if run.shares_rows and not all(block.exchanged for block in seen.blocks.values()):
        raise UnsupportedModelError(
            f"a block of {skeleton.config.model_type} runs no attention of transformers' attention "
            "interface: what positions it mixes, ranks that share rows could not. Plan it with cp=1"
        )
    phase, breakdown, activations = replay(skeleton, seen, run)
    return MemoryEstimate(
        peak_bytes=sum(breakdown.values()),
        peak_phase=phase,
        breakdown=breakdown,
        parameters=skeleton.parameters,
        active_parameters=skeleton.active_parameters,
        activation_bytes=activations,
        notes=tuple(_notes(skeleton, run)),
    )


def fits(skeleton: Skeleton, run: Run, memory_bytes: int | None) -> bool:
    """Whether a run fits on devices of that memory; see ``budget_of``."""
    return (
        estimate(skeleton, run).peak_bytes <= budget_of(run.device, run.num_gpus, memory_bytes).usable_bytes
    )


def _notes(skeleton: Skeleton, run: Run) -> Iterator[str]:
    """Caveats of the estimate."""
    config = skeleton.config
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < run.seq_length:
        yield f"the config gives the model {positions} positions"
    if skeleton.published:
        yield skeleton.published
    if config.model_type not in CHECKED_FAMILIES:
        yield (
            f"model type {config.model_type} was followed like any other but never compared with a "
            "measurement"
        )
    if run.optimizer == "adamw8bit" and run.num_gpus > 1:
        yield "set TORCHINDUCTOR_CACHE_DIR for each rank (see Troubleshooting): this optimizer is compiled"
    if not run.device.checked and run.device.name != "cpu":
        yield f"what attention keeps on {run.device.name} was never compared with a measurement there"


# --- what a device has for tensors ------------------------------------------------------------------------

_FRAGMENTS = 0.02  # share of the memory that the allocator has reserved and cannot use


@dataclass(frozen=True)
class Budget:
    """A device's memory, and the part of it that tensors cannot have.

    Attributes:
        memory_bytes: The whole memory, as ``nvidia-smi`` reports it.
        taken: What else takes memory, each with its bytes.
    """

    memory_bytes: int
    taken: tuple[tuple[str, int], ...]

    @property
    def usable_bytes(self) -> int:
        """Bytes left for tensors: an estimate's peak is compared with this."""
        return max(0, self.memory_bytes - sum(size for _, size in self.taken))

    def __str__(self) -> str:
        taken = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.taken)
        return f"{self.usable_bytes / GIB:.1f} of {self.memory_bytes / GIB:.1f} GiB usable ({taken})"


def budget_of(gpu: Gpu, num_gpus: int, memory_bytes: int | None = None) -> Budget:
    """The part of a device's memory that tensors can have.

    Args:
        gpu: The device.
        num_gpus: Number of ranks. NCCL's buffers come with more than one, and are larger where the ranks take
            more than one node.
        memory_bytes: Memory as ``nvidia-smi`` reports it; None takes that of the usual model.
    """
    memory = gpu.memory_bytes if memory_bytes is None else memory_bytes
    if gpu.name == "cpu":  # a tenth of a host's memory is left to others
        return Budget(memory, (("other processes", memory // 10),))
    taken = [
        # torch sees less than nvidia-smi reports as the total, by 350 MiB (RTX 4090) to 900 MiB (A100 80 GB).
        ("driver", int(min(256 * MIB, memory * _FRAGMENTS) + memory * 0.005)),
        # Kernels and stacks of one process; less with CUDA_MODULE_LOADING=LAZY, torch's default.
        ("CUDA context", 512 * MIB),
    ]
    if num_gpus > 1:  # buffers of the channels to other GPUs, outside of torch's allocator
        taken.append(("NCCL", (512 if num_gpus <= gpu.gpus_per_node else 1024) * MIB))
    return Budget(memory, (*taken, ("fragments", int(memory * _FRAGMENTS))))
