"""What a trace reports: bytes and work of each kind of block, and of all that is outside of the blocks."""

from dataclasses import dataclass

from fsdp_sft.planner.workload import Workload


@dataclass(frozen=True)
class Footprint:
    """Bytes and work of one block, without its parameters and their gathering.

    Attributes:
        kept: Bytes that the forward adds to the activations: what it saves and its output, less its input if
            that is no longer needed.
        forward_peak: Most bytes that the forward adds while it runs.
        unsaved_peak: The same where nothing is saved for a backward, as in a checkpointed block.
        again_peak: Most bytes that recomputation adds; it ends at the last tensor that the backward needs.
        saved: Bytes that the block's backward needs besides its input.
        backward_peak: Most bytes that the backward adds while it runs, gradients of parameters included.
        output: Bytes of the output.
        saves_input: Whether the backward itself, not only recomputation, reads the block's input.
        decisions: Bytes of a router's choices, which a checkpointed block keeps with its input.
        exchanged: Bytes that the forward sends to the ranks that share its rows or experts.
        forward: Work of the forward.
        again: Work of the part of the forward that is repeated if the block is checkpointed.
        backward: Work of the backward, without recomputation.
    """

    kept: int
    forward_peak: int
    unsaved_peak: int
    again_peak: int
    saved: int
    backward_peak: int
    output: int
    saves_input: bool
    decisions: int = 0
    exchanged: int = 0
    forward: Workload = ()
    again: Workload = ()
    backward: Workload = ()

    def left(self, checkpointed: bool) -> int:
        """Bytes that the forward leaves on the device for the backward."""
        return self.output + self.decisions if checkpointed else self.kept


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
