"""Peak memory of a real step on fake tensors, by torch's FSDPMemTracker; shares no code with the planner."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils

import fsdp_sft as fs
from fsdp_sft._model.blocks import find_blocks
from fsdp_sft.loss import linear

CPU = torch.device("cpu")


def tracked_peak(config: Any, *, num_gpus: int, dp_replicate: int = 1, **options: Any) -> tuple[int, str]:
    """(peak bytes, phase) of the steady-state step on rank 0 of a simulated job."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_gpus)
    try:
        mesh = fs.build_mesh(dp_replicate=dp_replicate, device_type="cpu")
        with FakeTensorMode(allow_non_fake_inputs=True), _no_packing():
            return _step(config, mesh, **options)
    finally:
        dist.destroy_process_group()
        gc.collect()


def counts_what_is_written_in_place() -> bool:
    """Whether the tracker takes the result of an in-place foreach operation on DTensors for new memory.

    In torch 2.11 it does: a step with ``foreach`` seems to need 11 times the parameters, where a real process
    needs at most 5 times, as ``estimate_memory`` says.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = fs.build_mesh(device_type="cpu")
        with FakeTensorMode():
            tensors = [DTensor.from_local(torch.empty(4096), mesh, [Shard(0)]) for _ in range(2)]
            torch._foreach_mul_(tensors, 2.0)  # DTensor makes tensors of its own to learn of an operation
            tracker = MemTracker()
            with tracker:
                torch._foreach_mul_(tensors, 2.0)
            return sum(tracker.get_tracker_snapshot("peak").get(CPU, {}).values()) > 0
    finally:
        dist.destroy_process_group()
        gc.collect()


def _step(
    config: Any,
    mesh: Any,
    *,
    micro_batch_size: int,
    seq_length: int,
    sac_ratio: Any = 0,
    sac_placement: str = "even",
    attention_mask: bool = True,
    loss_impl: str = "chunked",
    grad_accum_steps: int = 1,
    grad_sync: str = "each",
    master_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    optimizer: str = "adamw",
) -> tuple[int, str]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model.config.use_cache = False
    fs.apply_sac(model, sac_ratio, placement=sac_placement)
    fs.shard_model(model, mesh=mesh, master_dtype=master_dtype, reshard_after_forward=reshard_after_forward)
    if optimizer == "sgd":
        update: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        update = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=optimizer == "adamw_foreach")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    update.step()
    update.zero_grad()
    ids = torch.zeros((micro_batch_size, seq_length), dtype=torch.int64)
    batch = {"input_ids": ids}
    if attention_mask:
        batch["attention_mask"] = torch.ones_like(ids)
    tracker = FSDPMemTracker(model, update)
    watch = _Watch(tracker)
    with tracker:
        for step in range(grad_accum_steps):
            if step:
                tracker.reset_mod_stats()
            sync = grad_sync == "each" or step == grad_accum_steps - 1
            model.set_requires_gradient_sync(sync)
            model.set_is_last_backward(sync)
            _micro_step(model, dict(batch), loss_impl, watch)
            watch.mark("backward")
        update.step()
        watch.mark("optimizer")
    return watch.peak, watch.phase


@contextmanager
def _no_packing() -> Iterator[None]:
    """Answer what transformers and the loss ask of values, which fake tensors lack."""
    find = masking_utils.find_packed_sequence_indices
    targets = linear.targets_in
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    # Every position has a target; to look for them takes values too.
    linear.targets_in = lambda labels, vocabulary, known: torch.arange(labels.numel())
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
        linear.targets_in = targets


class _Watch:
    """Which phase the peak grew in last."""

    def __init__(self, tracker: FSDPMemTracker) -> None:
        self.tracker, self.peak, self.phase = tracker, 0, ""
        self.output: Any = None

    def mark(self, phase: str) -> None:
        peak = self.tracker.get_tracker_snapshot("peak")[CPU]["Total"]
        if peak > self.peak:
            self.peak, self.phase = peak, phase


def _micro_step(model: Any, batch: dict[str, Any], loss_impl: str, watch: _Watch) -> None:
    last = list(find_blocks(model).values())[-1]
    assert isinstance(last, FSDPModule)

    def at_the_last_block(_: Any, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(lambda grad: watch.mark("loss"))

    handle = last.register_forward_hook(at_the_last_block)
    try:
        _loss(model, batch, loss_impl, watch).backward()
    finally:
        handle.remove()


def _loss(model: Any, batch: dict[str, Any], loss_impl: str, watch: _Watch) -> torch.Tensor:
    """One micro-batch's loss.

    ``"plain"`` is a loop that gives the model's bfloat16 logits to cross entropy and keeps the model's output
    in a variable until the next one is there; ``"logits"`` and ``"chunked"`` are the library's.
    """
    ids = batch["input_ids"]
    if loss_impl == "chunked":
        return _loss_in_the_heads_place(model, batch)
    if loss_impl == "plain":
        watch.output = model(**batch, use_cache=False)
        return F.cross_entropy(watch.output.logits.flatten(0, 1), ids.flatten(), reduction="sum")
    logits = model(**batch, use_cache=False).logits[:, :-1].float().flatten(0, 1)
    return F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")


def _loss_in_the_heads_place(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """As ``loss_sum`` runs it: the loss is computed inside the model's forward, which then returns it."""
    head, forward, losses = model.get_output_embeddings(), model.forward, []

    def loss_of(hidden: torch.Tensor) -> torch.Tensor:
        ids = batch["input_ids"]
        losses.append(linear.linear_cross_entropy_sum(hidden, head.weight, ids, bias=head.bias))
        return hidden.new_empty((*hidden.shape[:-1], 0))

    def loss_of_model(*args: Any, **kwargs: Any) -> torch.Tensor:
        forward(*args, **kwargs)
        return losses[0]

    head.forward, model.forward = loss_of, loss_of_model
    try:
        return model(**batch, use_cache=False)
    finally:
        del head.forward, model.forward
