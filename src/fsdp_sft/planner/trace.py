"""One forward and backward on the meta device, in which one block of each kind takes part.

All other blocks pass their input on, so a trace costs a few blocks however deep the model. It shows what each
kind of block keeps and what it needs while it runs, from which ``replay`` builds a whole step.

A tensor is identified by the number that the ledger gives to its storage (see ledger.py). So "the block saved
its input" means that autograd packed the input or a view of it, and "the mask is kept by the blocks alone"
means that its number is dead once the forward has ended.

Bytes are read off the ledger at moments that hooks mark: before and after a block's forward, where the
gradient of its output arrives, and where the gradient of its input has been computed.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_sft._model.view import tensors_in
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.loss.head import replaced_forward
from fsdp_sft.planner.footprint import BlockRecord, Footprint, footprint
from fsdp_sft.planner.kernels import Kernels, chunked_loss, grouped_experts, micro_batch
from fsdp_sft.planner.ledger import Ledger, Workload, work_of
from fsdp_sft.planner.model import Skeleton
from fsdp_sft.planner.run import Run


@dataclass(frozen=True)
class Trace:
    """Bytes and work of a whole forward and backward, without parameters and their gathering.

    Attributes:
        blocks: Footprint of each kind of block, by the index of the first block of that kind.
        before: Bytes alive when the first block begins: its input, rotary tables, mask.
        arguments: The part of ``before`` that is alive in the backward only if blocks are checkpointed, as
            these keep their arguments: (storage, bytes), by the index of the first block of each kind.
        head_peak: Most bytes that last norm and head add in the forward, over ``before`` and the blocks'
            ``kept``.
        loss_peak: The same from the loss until its gradient reaches the model's output.
        head_backward_peak: The same from there until the gradient reaches the last block.
        residue: Bytes that are left of all this during the blocks' backward, gradients of norm and head
            included.
        embedding_peak: Most bytes that the embedding's backward adds at the end.
        head_gradients: Bytes of the gradients of norm and head.
        outputs: Bytes that the training loop holds on to until the end of the step: the logits of a plain
            loop.
        rest: Work outside of the blocks.
    """

    blocks: dict[int, Footprint]
    before: int
    arguments: dict[int, frozenset[tuple[int, int]]]
    head_peak: int
    loss_peak: int
    head_backward_peak: int
    residue: int
    embedding_peak: int
    head_gradients: int
    outputs: int
    rest: Workload = ()


# Fields that a trace does not depend on, at values that stand for all: setups that differ only in these share
# a trace.
_UNTRACED: dict[str, Any] = {
    "dp_replicate": 1,
    "grad_accum_steps": 1,
    "grad_sync": "each",
    "sac_ratio": 0,
    "sac_placement": "even",
    "reshard_after_forward": True,
    "optimizer": "adamw",
    **dict.fromkeys(("master_dtype", "frozen_dtype", "reduce_dtype"), torch.float32),
}


def trace(skeleton: Skeleton, run: Run) -> Trace:
    """Trace a model under a run; results are cached.

    Raises:
        UnsupportedModelError: If the model's forward depends on values, which meta tensors do not have, or
            its attention or experts cannot be shared out.
        ValueError: If ranks do not divide its heads or experts.
    """
    return _trace(skeleton, replace(run, **_UNTRACED, num_gpus=run.exchange_ranks))


@functools.lru_cache(maxsize=128)
def _trace(skeleton: Skeleton, run: Run) -> Trace:
    """``trace`` for a run that has the values of ``_UNTRACED``."""
    try:
        return _Traced(skeleton, run).result()
    except UnsupportedModelError:  # which says why
        raise
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        raise UnsupportedModelError(
            f"a step of model type {skeleton.config.model_type!r} (loss_impl={run.loss_impl!r}, "
            f"{run.exchange_ranks} ranks that exchange) cannot be followed without values "
            f"({type(error).__name__}: {str(error)[:200]}); measure a step of it instead"
        ) from error


class _Traced:
    """One traced step."""

    def __init__(self, skeleton: Skeleton, run: Run) -> None:
        self.skeleton = skeleton
        self.run = run
        self.ledger = Ledger()
        self.ledger.ignore(skeleton.traced_tensors)
        self.records = {kind: BlockRecord(skeleton.blocks[kind]) for kind in sorted(set(skeleton.kinds))}
        self.current: BlockRecord | None = None
        self.beside: tuple[Any, ...] | None = None
        # Whether the model's logits go to the cross entropy as they are.
        self.is_plain_loop = not run.shares_rows and run.logits_dtype in (None, run.param_dtype)
        self.at: dict[str, int] = {}  # moments of the ledger
        self.outputs = self.head_gradients = 0

    def result(self) -> Trace:
        """Run the step and sum up what was seen."""
        kernels = Kernels(self.run, self.ledger)
        try:
            experts = grouped_experts(self.skeleton.model, self.run, self.ledger)
            with self._instrumented(), experts, self.ledger, kernels, torch.enable_grad():
                self._step()
        finally:
            for tensor in self.skeleton.traced_tensors:
                tensor.grad = None
        return self._summary()

    def _mark(self, moments: dict[str, int], name: str, *_: Any) -> None:
        """Note that a moment is now."""
        moments[name] = len(self.ledger.events)

    def _step(self) -> None:
        """Forward, loss and backward of one micro-batch, with marks at the moments that a trace reports."""
        run = self.run
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            with micro_batch(self.skeleton.model, run, self.ledger) as inputs:
                output = self._forward(inputs)
            output.register_hook(functools.partial(self._mark, self.at, "loss"))
            self._mark(self.at, "head")
            loss = output if run.loss_impl == "chunked" else self._cross_entropy(output, inputs["input_ids"])
        if run.loss_impl == "logits" and self.is_plain_loop:
            self.outputs = self.ledger.sizes[self.ledger.number(output)]
        else:
            del output
        self._mark(self.at, "forward")
        loss.backward()
        for record in self.records.values():
            if record.block is self.skeleton.begins_backward:
                self._at_input_gradient(record)

    def _forward(self, inputs: dict[str, Any]) -> Any:
        """The model's output: logits, or the loss if that replaces the head."""
        if self.run.loss_impl == "logits":
            return self.skeleton.model(**inputs, use_cache=False).logits
        head = self.skeleton.model.get_output_embeddings()
        losses: list[torch.Tensor] = []

        def loss_in_place(hidden: torch.Tensor) -> torch.Tensor:
            rows = hidden.reshape(-1, hidden.shape[-1])
            losses.append(chunked_loss(rows, head.weight, head.bias, self.run.device, self.ledger))
            return hidden.new_empty((*hidden.shape[:-1], 0))

        with replaced_forward(head, loss_in_place):
            self.skeleton.model(**inputs, use_cache=False)
        return losses[0]

    def _cross_entropy(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The loss from logits in full."""
        # A plain loop shifts the labels and not the logits; so does a loss of rows that ranks share.
        if not (self.is_plain_loop or self.run.shares_rows):
            logits, ids = logits[:, :-1], ids[:, 1:]
        # Where ranks share rows, it is computed in float32 at least.
        shared = torch.promote_types(self.run.param_dtype, torch.float32)
        wide = (
            logits
            if self.is_plain_loop
            else logits.to(shared if self.run.shares_rows else self.run.logits_dtype)
        )
        return F.cross_entropy(wide.flatten(0, 1), ids.flatten(), reduction="sum")

    @contextmanager
    def _instrumented(self) -> Iterator[None]:
        """Context in which hooks watch one block of each kind, and the others pass their input on."""
        with ExitStack() as undone:
            for block in set(self.skeleton.blocks).difference(r.block for r in self.records.values()):
                undone.enter_context(replaced_forward(block, self._pass_on))
            for record in self.records.values():
                before, after = (functools.partial(hook, record) for hook in (self._before, self._after))
                undone.enter_context(record.block.register_forward_pre_hook(before, with_kwargs=True))
                undone.enter_context(record.block.register_forward_hook(after))
            yield

    def _pass_on(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of a silenced block: its input, in a tuple with what else blocks return, if they do."""
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if self.beside is None else (hidden, *self.beside)

    def _before(self, record: BlockRecord, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a block's forward: try it without saving, and note what is alive."""
        self._mark(record.at, "unsaved")
        with torch.no_grad():
            module.forward(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        # The gradient of a view is the last thing that this block's backward computes. On the input itself,
        # the hook would also wait for whatever else reads it.
        if hidden.requires_grad or module is self.skeleton.begins_backward:
            hidden = hidden.view_as(hidden)
        else:
            hidden = _Joined.apply(hidden, torch.empty(0, device="meta", requires_grad=True))
        if hidden.requires_grad:
            hidden.register_hook(functools.partial(self._at_input_gradient, record))
        record.input = self.ledger.number(hidden)
        record.arguments = set(map(self.ledger.number, tensors_in((args[1:], kwargs)))) - {record.input}
        self._mark(record.at, "before")
        self.current = record
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    def _after(self, record: BlockRecord, module: nn.Module, args: Any, output: Any) -> None:
        """After a block's forward: note what is alive."""
        self.beside = output[1:] if isinstance(output, tuple) else None
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(functools.partial(self._at_output_gradient, record))
        record.output = self.ledger.number(hidden)
        self._mark(record.at, "after")
        self.current = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        # autograd calls this for each tensor that it saves.
        if self.current is not None:
            self.current.saved.add(self.ledger.number(tensor))
            self._mark(self.current.at, "again")
        return tensor.detach()

    def _at_output_gradient(self, record: BlockRecord, grad: torch.Tensor) -> None:
        """The backward has reached a block's output: the block's own backward begins."""
        if "blocks" not in self.at:  # the last block's, with which the blocks' backward begins
            self._mark(self.at, "blocks")
            others = self.skeleton.traced_tensors
            self.head_gradients = sum(t.grad.nbytes for t in others if t.grad is not None)
        self._mark(record.at, "backward")

    def _at_input_gradient(self, record: BlockRecord, grad: torch.Tensor | None = None) -> None:
        """At the end of a block's backward: drop its parameters' gradients, which ``replay`` counts."""
        self._mark(record.at, "end")
        for parameter in record.block.parameters():
            parameter.grad = None
        self._mark(self.at, "embedding")

    def _summary(self) -> Trace:
        """The trace, from the moments and from what was seen of each block."""
        ledger, at, records = self.ledger, self.at, self.records
        # What autograd has saved is alive after the forward. A mask that is dead then would only be kept by a
        # checkpointed block.
        dead = {event.freed for event in ledger.events[: at["forward"]]}
        kept = {
            kind: ledger.live_at(record.at["after"])
            - ledger.live_at(record.at["before"])
            - (ledger.sizes[record.input] if record.input in dead else 0)
            for kind, record in records.items()
        }
        first = min(record.at["before"] for record in records.values())
        last = max(record.at["after"] for record in records.values())
        base = ledger.live_at(first) + sum(kept.values())

        def peak(begin: int, end: int) -> int:
            return ledger.live_at(begin) + ledger.added(begin, end) - base

        inside = set[int]()
        for record in records.values():
            inside.update(range(record.at["unsaved"], record.at["after"]))
            inside.update(range(record.at["backward"], record.at["end"]))
        return Trace(
            blocks={
                kind: footprint(record, ledger, kept[kind], compiled=self.run.compile)
                for kind, record in records.items()
            },
            before=ledger.live_at(first),
            arguments={
                kind: frozenset((number, ledger.sizes[number]) for number in record.arguments & dead)
                for kind, record in records.items()
            },
            head_peak=peak(last, at["head"]),
            loss_peak=peak(at["head"], at["loss"]),
            head_backward_peak=peak(at["loss"], at["blocks"]),
            residue=ledger.live_at(at["blocks"]) - base,
            embedding_peak=ledger.added(at["embedding"], len(ledger.events)),
            head_gradients=self.head_gradients,
            outputs=self.outputs,
            rest=work_of(event for index, event in enumerate(ledger.events) if index not in inside),
        )


class _Joined(torch.autograd.Function):
    """A view of a tensor that is no part of a graph, as the output of a layer that is trained.

    A leaf that requires a gradient would not do: its graph keeps it alive.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        return None, None
