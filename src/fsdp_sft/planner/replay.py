"""One optimizer step replayed on paper: when each buffer is alive, in the order in which FSDP2 allocates.

Source of the order: ``torch/distributed/fsdp/_fully_shard`` (``FSDPParamGroup``, ``foreach_all_gather``,
``foreach_reduce``), torch 2.11 to 2.13.

A worked example: a Llama of two blocks on 4 H100s, one row of 1,024 tokens on each, and AdamW. A block has
32 MiB of bfloat16 parameters, embedding and head 16 MiB each. They are not tied, so each is a separate
group; the root, FSDP2's group of the parameters in no other group, has only the last norm. Shards, optimizer
states and cuBLAS's workspace (176 MiB) are always allocated. The picture shows the rest, at the moments of
one step at which it is largest. One letter is 8 MiB::

    V embedding or head, gathered    B block, gathered    a all-gather buffers    k activations kept for later
    g whole gradients    s reduce-scatter input    o shards of gradients    w tensors of what runs just now

                             MiB
    forward    embedding      35  VVaa
               block 1       131  BBBBaaaawwwwwwww
               gather 2      133  aaaaaaaaakkkkkkk
               block 2       189  BBBBaaaakkkkkkkwwwwwwww
               gather head   171  aaaaaaakkkkkkkkkkkkkkk
    loss       head, loss    275  VVaakkkkkkkkkkkkkkkwwwwwwwwwwwwwww    <- the peak of this step
               their backward  221  VVaaaakkkkkkkkkkkkkkkwwwwwww
    backward   reduce head   207  aaaakkkkkkkkkkkkkkkggsssss
               block 2       247  BBBBaaaakkkkkkkkkkkkkkkssssowww
               reduce 2      197  aaaakkkkkkkggggsssssssso
               gather 1      213  BBBBaaaakkkkkkkssssssssooo
               block 1       205  BBBBkkkkkkkssssssssooowww
               reduce 1      123  ggggssssssssooo
               embedding      96  ggsssssooooo
    optimizer  update         96  oooooowwwwww

How to read it:

- An all-gather brings a group's shards into a buffer (``a``), from which they are copied out into parameters
  (``V``, ``B``). In the forward FSDP2 frees a group's buffer only after the buffer of the next one has been
  allocated, so that at "gather 2" two are alive, with the 8 MiB that this rank sends.
- The embedding is freed after its forward, and not gathered for its backward. A block is freed after its
  forward (``reshard_after_forward``) and gathered again for its backward. The head stays gathered between the
  two. If embedding and head are tied, both are in the root, which stays gathered for the whole step.
- The backward prefetches: while the head's backward runs, block 2 is gathered (``a``); while that of block 2
  runs, block 1 is.
- A block's gradients (``g``, bfloat16) are copied into the input of the reduce-scatter (``s``, float32, hence
  twice as large), and then freed. FSDP2 keeps that input until the next reduce-scatter, so ``s`` is there
  until the backward ends. What a rank keeps of the result is ``o``.
- In the backward ``k`` shrinks while ``s`` and ``o`` grow. If blocks keep much, as here, the peak is at the
  loss or in the last block's backward. If they keep little (checkpointed blocks, few tokens), it comes after
  the first reductions, when ``s`` and ``o`` are there too.

tests/planner/test_replay.py draws the picture again and compares.
"""

from collections import defaultdict

from fsdp_sft.optimizer.adamw import working_bytes
from fsdp_sft.planner.model import Skeleton
from fsdp_sft.planner.parameters import Sizes, group_sizes
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.trace import Footprint, Trace

UNSHARDED = "gathered parameters"
ALL_GATHER = "all-gather buffers"
WHOLE_GRADIENTS = "gradients before reduction"
REDUCE_SCATTER = "reduce-scatter buffers"
INPUTS = "embedding, rotary tables, mask"
HEAD = "logits and loss"
WORKING = "block at work"


def replay(skeleton: Skeleton, trace: Trace, run: Run) -> tuple[str, dict[str, int], int]:
    """Find the peak of one optimizer step in the steady state, when optimizer states exist.

    Returns:
        The phase (``"loss"``, ``"backward"`` or ``"optimizer"``) of the moment at which most memory is
        allocated; the bytes allocated then, by kind; and those that the forward of all blocks leaves for the
        backward.
    """
    step = _Step(skeleton, trace, run)
    # All micro-steps but the first and the last are alike, so few are enough. With "last", a second one
    # without reduction adds to the unsharded gradients of the first; with "each", the second finds the
    # gradient shards of the first.
    for _ in range(min(run.grad_accum_steps - 1, 2)):
        step.micro_step(reduce=run.grad_sync == "each")
    step.micro_step()
    step.optimizer()
    activations = sum(step.kept(index)[1] for index in range(step.first_backward, len(step.sizes)))
    return step.phase, step.breakdown, activations


class _Step:
    """The bytes alive at the current moment of a step, by kind, and the peak so far.

    ``hold`` and ``free`` record allocations and frees. ``look`` is called wherever the total may peak, with
    what is alive at that moment only.
    """

    def __init__(self, skeleton: Skeleton, trace: Trace, run: Run) -> None:
        self.run = run
        self.trace = trace
        self.footprints: list[Footprint] = [trace.blocks[kind] for kind in skeleton.kinds]
        self.first_backward = skeleton.first_backward
        self.checkpointed = run.checkpointed(len(skeleton.blocks))
        self.sizes = [group_sizes(group, run) for group in skeleton.groups]
        self.root, self.embedding, self.head = (
            group_sizes(group, run) for group in (skeleton.root, skeleton.embedding, skeleton.head)
        )
        self.gathers_embedding_again = skeleton.gathers_embedding_again and run.reshard_after_forward
        # A checkpointed block keeps the tensors that it was called with, such as the mask. Blocks of one kind
        # share a mask; blocks with a window have another one. So each storage is counted once.
        kept = {trace.arguments[skeleton.kinds[index]] for index in self.checkpointed}
        self.arguments = sum(size for _, size in frozenset[tuple[int, int]]().union(*kept))
        self.held: dict[str, int] = defaultdict(int)
        self.phase = ""
        self.breakdown: dict[str, int] = {}  # what was alive at the peak
        self.reduced = 0  # bytes of the latest reduce-scatter's input, which the next one frees
        # Unsharded gradients of earlier micro-steps: of the blocks, the root, the embedding, the head.
        self.accumulated = [0] * (len(self.sizes) + 3)
        self.has_gradients = False
        sized = [(group_sizes(group, run), number) for group, number in skeleton.distinct_groups]
        self.trained = [size for sizes, number in sized for size in sizes.shards * number]
        self.hold("cuBLAS workspace", run.device.workspace_bytes)
        self.hold("parameters (shards)", sum(number * sizes.stored for sizes, number in sized))
        self.hold("optimizer states", sum(_state_bytes(size, run) for size in self.trained))

    def hold(self, part: str, size: int) -> None:
        """Allocate ``size`` bytes of a kind."""
        self.held[part] += size

    def free(self, part: str, size: int) -> None:
        """Free ``size`` bytes of a kind."""
        self.hold(part, -size)

    def look(self, phase: str, part: str = "", extra: int = 0) -> None:
        """Update the peak with this moment, at which ``extra`` more bytes of ``part`` are alive."""
        alive = {**self.held, part: self.held.get(part, 0) + extra}
        if sum(alive.values()) > sum(self.breakdown.values()):
            self.phase, self.breakdown = phase, {name: size for name, size in alive.items() if size}

    # --- forward ------------------------------------------------------------------------------------------

    def micro_step(self, *, reduce: bool = True) -> None:
        """Forward and backward of one micro-batch, with the reduction of its gradients or without."""
        self._loss(self._forward())
        self._backward(reduce=reduce)

    def _forward(self) -> int:
        """Forward of the embedding and the blocks; returns the size of the last all-gather buffer."""
        previous = self._gather(self.root, 0)
        previous = self._gather(self.embedding, previous)
        self.hold(INPUTS, self.trace.before)
        self.look("loss")
        if self.run.reshard_after_forward:
            self.free(UNSHARDED, self.embedding.gathered)
        for index, footprint in enumerate(self.footprints):
            previous = self._gather(self.sizes[index], previous)
            saves = index >= self.first_backward and index not in self.checkpointed
            self.look("loss", WORKING, footprint.forward_peak if saves else footprint.unsaved_peak)
            if index >= self.first_backward:
                self.hold(*self.kept(index))
            if self.run.reshard_after_forward:
                self.free(UNSHARDED, self.sizes[index].gathered)
        return previous

    def _gather(self, sizes: Sizes, previous: int, phase: str = "loss") -> int:
        """Gather a group; returns the size of its buffer, which the next gather frees after its own."""
        if not sizes.gathered:  # the embedding and the head are in the root
            return previous
        self.hold(ALL_GATHER, sizes.buffer)
        self.look(phase, ALL_GATHER, sizes.cast)
        self.free(ALL_GATHER, previous)
        self._copy_out(sizes, phase)
        return sizes.buffer

    def _copy_out(self, sizes: Sizes, phase: str) -> None:
        """Make parameters of what was gathered."""
        self.hold(UNSHARDED, sizes.gathered)
        self.look(phase, ALL_GATHER, sizes.moved)
        self.look(phase, "values of packed parameters at work", sizes.decoding)

    def kept(self, index: int) -> tuple[str, int]:
        """What a block keeps for its backward: the kind, and the bytes."""
        checkpointed = index in self.checkpointed
        kind = "activations of checkpointed blocks" if checkpointed else "activations kept"
        return kind, self.footprints[index].left(checkpointed)

    def _loss(self, last_gather: int) -> None:
        """Head, loss, and their backward down to the last block, which is prefetched meanwhile."""
        trace = self.trace
        self.hold(INPUTS, self.arguments)
        last_gather = self._gather(self.head, last_gather)
        self.look("loss", HEAD, trace.head_peak)
        self.free(ALL_GATHER, last_gather)
        self.free(HEAD, self.held[HEAD])  # the outputs that a plain loop held since the last micro-step
        self.look("loss", HEAD, trace.loss_peak)
        self._prefetch(len(self.sizes) - 1)
        self.look("loss", HEAD, trace.head_backward_peak)
        self.hold(WHOLE_GRADIENTS, trace.head_gradients)
        left = trace.residue - trace.head_gradients
        self.hold(HEAD, max(left, 0))
        self.hold(INPUTS, min(left, 0))  # what only the forward needed of the masks

    # --- backward -----------------------------------------------------------------------------------------

    def _prefetch(self, index: int) -> None:
        """Start to gather the block whose backward comes next."""
        if index >= self.first_backward and self.run.reshard_after_forward:
            self.hold(ALL_GATHER, self.sizes[index].ahead)
            self.look("backward", ALL_GATHER, self.sizes[index].cast)

    def _backward(self, *, reduce: bool) -> None:
        """Backward of the blocks and of the embedding; each group's reduction follows its backward."""
        self.free(UNSHARDED, self.head.gathered)
        self._reduce(len(self.sizes) + 2, self.head, reduce=reduce)
        for index in reversed(range(self.first_backward, len(self.sizes))):
            self._block_backward(index)
            self.free(*self.kept(index))
            self._reduce(index, self.sizes[index], reduce=reduce)
        if self.gathers_embedding_again:
            self.free(ALL_GATHER, self._gather(self.embedding, 0, "backward"))
        self.look("backward", WHOLE_GRADIENTS, self.trace.embedding_peak)
        outside = self.root.gradients + self.embedding.gradients + self.head.gradients
        self.hold(WHOLE_GRADIENTS, outside - self.trace.head_gradients)
        self.free(INPUTS, self.held[INPUTS])
        self.hold(HEAD, self.trace.outputs - self.held[HEAD])
        self.free(UNSHARDED, self.held[UNSHARDED])
        self._reduce(len(self.sizes), self.root, reduce=reduce)
        self._reduce(len(self.sizes) + 1, self.embedding, reduce=reduce)
        self.look("backward")
        # FSDP2's callback at the end of the backward frees what it has kept of reductions.
        self.free(REDUCE_SCATTER, self.held[REDUCE_SCATTER])
        self.reduced = 0
        self.has_gradients = self.has_gradients or reduce
        self.look("backward")

    def _block_backward(self, index: int) -> None:
        """Backward of one block, from copying its parameters out of the prefetched buffer to freeing them."""
        sizes, footprint = self.sizes[index], self.footprints[index]
        if self.run.reshard_after_forward:
            self._copy_out(sizes, "backward")
            self.free(ALL_GATHER, sizes.ahead)
        self._prefetch(index - 1)
        working = footprint.backward_peak
        if index in self.checkpointed:
            working = max(footprint.again_peak, footprint.saved + working)
        self.look("backward", WORKING, working)
        self.free(UNSHARDED, sizes.gathered)
        self.hold(WHOLE_GRADIENTS, sizes.gradients)

    def _reduce(self, index: int, sizes: Sizes, *, reduce: bool) -> None:
        """Reduce a group's gradients when its backward is over, or add them to those of earlier micro-steps.

        Allocations and frees are in the order of ``FSDPParamGroup.post_backward`` and ``foreach_reduce``.
        """
        if not sizes.gradients:
            return
        # Gradients that wait for a later reduction are kept in the dtype of the reduction.
        wide = sizes.gradients * self.run.reduce_dtype.itemsize // self.run.param_dtype.itemsize
        if not reduce and not self.accumulated[index]:
            self.hold(WHOLE_GRADIENTS, wide)
            self.accumulated[index] = wide
        if self.accumulated[index]:
            self.look("backward")
            self.free(WHOLE_GRADIENTS, sizes.gradients)
        if not reduce:
            return
        self.look("backward", WHOLE_GRADIENTS, sizes.largest_moved_gradient)
        self.free(REDUCE_SCATTER, self.reduced)
        self.hold(REDUCE_SCATTER, sizes.reduced)
        self.look("backward", WHOLE_GRADIENTS, sizes.last_moved_gradient)
        self.free(WHOLE_GRADIENTS, self.accumulated[index] or sizes.gradients)
        self.accumulated[index] = 0
        self.reduced = sizes.reduced
        cast = sizes.shard_gradients if sizes.shard_gradients != sizes.scattered else 0
        lingering = sizes.last_gradient + sizes.last_moved_gradient if self.run.num_shards > 1 else 0
        self.hold(WHOLE_GRADIENTS, lingering)
        self.look("backward", REDUCE_SCATTER, sizes.scattered + cast)
        self.free(WHOLE_GRADIENTS, lingering)
        if not self.has_gradients:
            self.hold("gradients (shards)", sizes.shard_gradients)
        if self.run.dp_replicate > 1 and (cast or self.has_gradients):
            # FSDP2 keeps the all-reduced tensor until the backward ends, even where the gradient is a copy.
            self.hold(REDUCE_SCATTER, sizes.scattered)

    # --- optimizer ----------------------------------------------------------------------------------------

    def optimizer(self) -> None:
        """Look at the update, which needs no gathered parameters."""
        dtype, largest = self.run.master_dtype, max(self.trained, default=0)
        working = {
            "adamw_for_loop": 2 * dtype.itemsize * largest,
            "adamw_foreach": dtype.itemsize * sum(self.trained),  # the denominators of all parameters at once
            "adamw_stochastic": working_bytes(largest, dtype),
        }
        usual = "adamw_for_loop" if self.run.device.name == "cpu" else "adamw_foreach"
        optimizer = usual if self.run.optimizer == "adamw" else self.run.optimizer
        self.look("optimizer", "optimizer at work", working.get(optimizer, 0))


def _state_bytes(elements: int, run: Run) -> int:
    """Bytes of the optimizer states of a parameter, of which a rank's shard has ``elements``."""
    # torchao rounds the states of a shard that has 4,096 elements or more in whole blocks of 256, to one byte
    # and a float32 scale for each block (``AdamW8bit._new_buffer``).
    if run.optimizer == "adamw8bit" and elements >= 4096 and elements % 256 == 0:
        return 2 * elements + 2 * 4 * (elements // 256)
    return {"sgd": 0, "sgd_momentum": 1}.get(run.optimizer, 2) * elements * run.master_dtype.itemsize
