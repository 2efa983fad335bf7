"""How long an optimizer step takes: a model good for ranking plans, not for booking hours."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from fsdp_sft.metrics import model_flops_per_token
from fsdp_sft.planner.model import Skeleton
from fsdp_sft.planner.setup import Setup
from fsdp_sft.planner.trace import trace

# Measured on the step as a whole: recomputing every block costs 23 % where it stops early, because the last
# matrix product of a block is left out, and the loss, the head and the optimizer are not repeated.
_RECOMPUTE = 0.23
_EFFICIENCY = 0.5  # of the peak that a large step reaches
_HALF_SPEED_TOKENS = 256  # a micro-batch of so many tokens reaches half of that
_TOUCHES = 6  # how often what is exchanged is read or written on its way: cut, joined, put in its place


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by part.

    Attributes:
        compute: Of one micro-step, recomputation included.
        recompute: The part of ``compute`` that checkpointing adds.
        communication: Of one micro-step; it runs beside the computation.
        exchange: Of one micro-step, between ranks that share rows; nothing runs beside it.
        offload: Of one micro-step, activations to the host and back; they run beside the computation.
        optimizer: Of the update.
        total: Of the whole step.
    """

    compute: float
    recompute: float
    communication: float
    exchange: float
    offload: float
    optimizer: float
    total: float


def step_time(config: Any, skeleton: Skeleton, setup: Setup, *, exchanging: bool = True) -> StepTime:
    """``accumulation x (exchange + max(compute, communication, offload)) + optimizer``.

    Without ``exchanging`` that is a lower bound, for which nothing has to be traced.
    """
    tokens = setup.micro_batch_size * setup.tokens_per_rank
    rate = setup.gpu.flops_per_second * _EFFICIENCY * tokens / (tokens + _HALF_SPEED_TOKENS)
    plain = _flops_per_token(config, skeleton, setup.seq_length) * tokens / rate
    ratio = Fraction(len(setup.checkpointed(len(skeleton.blocks))), len(skeleton.blocks))
    recompute = plain * _RECOMPUTE * float(ratio)
    gathering, reducing = _communication(skeleton, setup)
    each = setup.grad_sync == "each"
    communication = gathering + (reducing if each else 0.0)
    exchange = _exchange(skeleton, setup) if exchanging and setup.cp > 1 else 0.0
    offload = _offload(skeleton, setup) if exchanging and setup.activations_leave else 0.0
    optimizer = _update(skeleton, setup)
    total = setup.grad_accum_steps * (exchange + max(plain + recompute, communication, offload)) + optimizer
    if not each:
        total += max(0.0, reducing - plain)
    return StepTime(plain + recompute, recompute, communication, exchange, offload, optimizer, total)


def _flops_per_token(config: Any, skeleton: Skeleton, seq_length: int) -> float:
    try:
        return model_flops_per_token(config, seq_length)
    except ValueError:  # a family whose matrix products the config does not name
        return 6 * skeleton.active_parameters


def _communication(skeleton: Skeleton, setup: Setup) -> tuple[float, float]:
    """Seconds to gather the parameters of one micro-step, and to reduce its gradients."""
    gpu, shards = setup.gpu, setup.num_shards
    within = gpu.node_bytes_per_second if shards <= gpu.gpus_per_node else gpu.bytes_per_second
    trained = sum(n * group.elements(trained=True) for group, n in skeleton.distinct_groups)
    share = (shards - 1) / shards
    gathers = 2 if setup.reshard_after_forward else 1
    gathering = gathers * skeleton.parameters * setup.param_dtype.itemsize * share / within
    reducing = trained * setup.reduce_dtype.itemsize * share / within
    if setup.dp_replicate > 1:
        across = gpu.node_bytes_per_second if setup.num_gpus <= gpu.gpus_per_node else gpu.bytes_per_second
        again = 2 * (setup.dp_replicate - 1) / setup.dp_replicate
        reducing += again * trained * setup.reduce_dtype.itemsize / shards / across
    return gathering, reducing


def _exchange(skeleton: Skeleton, setup: Setup) -> float:
    """Seconds of the exchanges around attention: of forward, backward, and what is computed again."""
    blocks, checkpointed = trace(skeleton, setup).blocks, setup.checkpointed(len(skeleton.blocks))
    exchanged = sum(
        blocks[kind].exchanged * (2 + (index in checkpointed)) for index, kind in enumerate(skeleton.kinds)
    )
    gpu = setup.gpu
    link = gpu.node_bytes_per_second if setup.cp <= gpu.gpus_per_node else gpu.bytes_per_second
    share = (setup.cp - 1) / setup.cp
    return exchanged * (share / link + _TOUCHES / gpu.memory_bytes_per_second)


def _offload(skeleton: Skeleton, setup: Setup) -> float:
    """Seconds to copy what checkpointed blocks keep to the host and back."""
    blocks = trace(skeleton, setup).blocks
    moved = sum(blocks[skeleton.kinds[i]].output for i in setup.checkpointed(len(skeleton.blocks)))
    return 2 * moved / setup.gpu.host_bytes_per_second


def _update(skeleton: Skeleton, setup: Setup) -> float:
    """Masters, gradients and two states are read and three of them written."""
    trained = sum(n * group.elements(trained=True) for group, n in skeleton.distinct_groups)
    moved = 7 * setup.master_dtype.itemsize * trained / setup.num_shards
    return moved / (setup.gpu.bytes_per_second if setup.cpu_offload else setup.gpu.memory_bytes_per_second)
