"""Draw a program: what it is made of, its steps, and the one thing in which a rank may differ."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Step = tuple[Any, ...]

SETTINGS: dict[str, tuple[str, ...]] = {
    "mesh": ("fsdp 2", "single", "replicas 2"),
    "model": ("llama", "tied", "lora", "mixtral", "llama", "lora"),
    "sac": ("0", "1/3", "1", "1 offloaded"),
    "shards": ("freed", "freed", "freed", "kept after the forward"),
    "optimizer": ("adamw", "sgd"),
    "window": ("1", "2"),
    "loss": ("auto", "logits"),
    "mask": ("ones", "numbers of documents"),
    # put on before the model is sharded
    "at first": ("nothing", "nothing", "hook on a block", "hook on the head", "wrapped head", "frozen layer"),
}
LAYERS = 3

# What is put on at one call and taken off at the next.
TOGGLES = (
    "hook on a block",
    "hook on the head",
    "wrapped head",
    "wrapped model",
    "another loss of the model",
    "frozen layer",
    "hook on a weight",
    "merged",
)
# What changes the forward, so that its loss has to be prepared again.
OF_THE_FORWARD = {
    "hook on a block",
    "hook on the head",
    "wrapped head",
    "wrapped model",
    "another loss of the model",
    "merged",
}
LOSSES = ("own", "own", "own", "own", "sum", "sum", "coefficient")
WAYS_TO_FAIL = ("forward", "backward", "loss_fn")
# What one rank may do where the others do as the program says. A hook is none of it: what only watches a
# model, as `wandb.watch` does, is put on one rank, and what a hook does cannot be told.
DIFFERENCES = (
    "leaves a step out",
    "evaluates",
    "saves",
    "another rate",
    "another clip",
    "another layer frozen",
    "one batch less",
    "another loss",
)


@dataclass(frozen=True)
class Program:
    """A list of steps.

    Attributes:
        seed: Of the model, the rows and whatever else is drawn.
        settings: Of ``SETTINGS``.
        steps: Names with arguments, as the methods of ``User`` take them.
        odd: Index of a step before (or in place of) which the last rank does something of ``DIFFERENCES``.
    """

    seed: int
    settings: dict[str, str]
    steps: tuple[Step, ...]
    odd: tuple[int, str] | None = None

    @property
    def ranks(self) -> int:
        return 1 if self.settings["mesh"] == "single" else 2


@st.composite
def programs(draw: Any, *, odd: bool | None = None) -> Program:
    """A program; in every fourth, or as ``odd`` says, a rank differs."""
    settings = {axis: draw(st.sampled_from(options)) for axis, options in SETTINGS.items()}
    if odd is None:
        odd = draw(st.integers(0, 3)) == 3
    if odd and settings["mesh"] == "single":
        settings["mesh"] = "fsdp 2"
    seed = draw(st.integers(0, 99))
    drawn = draw(st.lists(st.tuples(_step(settings), _trains()), min_size=5, max_size=11))
    # The last two train: what a step has left behind is seen at the end.
    steps = [step for pair in drawn for step in pair if step] + [draw(_trains(always=True)), ("train", "own")]
    if not odd:
        return Program(seed, settings, tuple(steps))
    place = draw(st.sampled_from([index for index, step in enumerate(steps) if step[0] == "train"]))
    # A rank that is a step behind is met by its neighbours in another call at the latest here.
    after = ("train", "own"), ("evaluate", "own")
    return Program(seed, settings, (*steps[: place + 1], *after), (place, draw(st.sampled_from(DIFFERENCES))))


def _trains(*, always: bool = False) -> Any:
    trains = st.tuples(st.just("train"), st.sampled_from(LOSSES))
    return trains if always else st.one_of(trains, st.none())


def _step(settings: dict[str, str]) -> Any:
    """One call between the steps that train."""
    toggles = [name for name in TOGGLES if settings["model"] == "lora" or name != "merged"]
    arguments: dict[str, tuple[Any, ...]] = {
        "toggle": (st.sampled_from(toggles),),
        "evaluate": (st.sampled_from(("own", "own", "sum")),),
        "generate": (),
        "save": (),
        "load": (st.integers(0, 3),),
        # Not in the first layer: frozen, it has no backward.
        "fail": (st.sampled_from(WAYS_TO_FAIL), st.integers(1, LAYERS - 1), st.integers(0, 1)),
        "rate": (st.sampled_from((0.01, 0.03)),),
    }
    return st.one_of([st.tuples(st.just(name), *drawn) for name, drawn in arguments.items()])
