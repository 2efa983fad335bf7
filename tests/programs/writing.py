"""Draw a program: what it is made of, its steps, and the one thing in which a rank may differ."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Step = tuple[Any, ...]

SETTINGS: dict[str, tuple[str, ...]] = {
    "mesh": ("fsdp 2", "single", "replicas 2"),
    "model": ("llama", "tied", "lora", "mixtral", "adalora"),
    "sac": ("0", "1/3", "1", "1 offloaded"),
    "shards": ("freed", "kept after the forward"),
    "optimizer": ("adamw", "sgd"),
    "window": ("1", "2"),
    "loss": ("auto", "logits"),
    "mask": ("ones", "numbers of documents"),
    "loader": ("windows", "by hand"),
    # put on before the model is sharded
    "at first": ("nothing", "nothing", "hook on a block", "hook on the head", "wrapped head", "frozen layer"),
}
RARE = {"model": "adalora", "shards": "kept after the forward"}  # an option in one of six programs
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


def drawn(seed: int) -> Program:
    """The program of a seed; every fourth has a rank that differs."""
    generator = random.Random(seed)
    settings = {axis: generator.choice(options) for axis, options in SETTINGS.items()}
    for axis, option in RARE.items():
        others = [other for other in SETTINGS[axis] if other != option]
        settings[axis] = option if generator.random() < 1 / 6 else generator.choice(others)
    odd = seed % 4 == 3
    if odd and settings["mesh"] == "single":
        settings["mesh"] = "fsdp 2"
    steps = tuple(_steps(generator, settings, generator.randint(5, 11)))
    if not odd:
        return Program(seed, settings, steps)
    trained = [index for index, step in enumerate(steps) if step[0] == "train"]
    place = generator.choice(trained)
    # A rank that is a step behind is met by its neighbours in another call at the latest here.
    after = ("train", "own"), ("evaluate", "own")
    return Program(seed, settings, (*steps[: place + 1], *after), (place, generator.choice(DIFFERENCES)))


def _steps(generator: random.Random, settings: dict[str, str], number: int) -> Iterator[Step]:
    """Steps of which at least the first or the second, and the last, train."""
    if generator.random() < 0.5:
        yield "train", "own"
    for _ in range(number):
        yield _step(generator, settings)
        if generator.random() < 0.5:
            yield "train", generator.choice(LOSSES)
    yield "train", generator.choice(LOSSES)
    yield ("train", "own")


def _step(generator: random.Random, settings: dict[str, str]) -> Step:
    adapters = settings["model"] in ("lora", "adalora")
    draws: list[Step] = [
        ("toggle", generator.choice([name for name in TOGGLES if adapters or name != "merged"])),
        ("toggle", generator.choice([name for name in TOGGLES if adapters or name != "merged"])),
        ("evaluate", generator.choice(("own", "own", "sum"))),
        ("generate",),
        ("reference",),
        ("save",),
        ("load", generator.randrange(4)),
        # Not in the first layer: frozen, it has no backward.
        ("fail", generator.choice(WAYS_TO_FAIL), generator.randrange(1, LAYERS), generator.randrange(2)),
        ("rate", generator.choice((0.01, 0.03))),
        ("stray",),
        ("leave uncompared",),
        ("epoch",),
        ("checkpointing", generator.choice(("0", "1/3", "1"))),
        ("export",),
    ]
    return generator.choice(draws)
