"""Why a combination is refused: the list of which the end of docs/reference/errors.md is made.

``python -m tests.compositions.reasons`` makes it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.compositions.axes import Draw


@dataclass(frozen=True)
class Reason:
    """A refusal.

    Attributes:
        name: What is refused, in a few words.
        error: The error's class.
        message: A pattern that its message has in it.
        applies: To which draws.
        axes: Those that decide it.
        instead: What to do.
        sometimes: Whether some of the draws to which it applies run all the same.
    """

    name: str
    error: str
    message: str
    applies: Callable[[Draw], bool]
    axes: tuple[str, ...]
    instead: str
    sometimes: bool = False


def _is(draw: Draw, **options: str | tuple[str, ...]) -> bool:
    return all(
        draw[axis] in ((wanted,) if isinstance(wanted, str) else wanted) for axis, wanted in options.items()
    )


REASONS: tuple[Reason, ...] = (
    Reason(
        "adapters that begin from the base weights, before there are any",
        "UnsupportedModelError",
        r"can only be initialised|cannot be initialised|initialised from|initialises adapters from",
        lambda draw: _is(
            draw,
            adapters=("dora", "lora and tokens"),
            start=("meta", "load_pretrained"),
        ),
        ("adapters", "start"),
        "load the base model with `from_pretrained`, put the adapters in, and shard it",
    ),
    Reason(
        "adapters that peft put into a model without weights",
        "CheckpointMismatchError",
        r"lora_",
        lambda draw: draw["adapters"] != "none" and _is(draw, start="meta") and draw["adapted by"] == "peft",
        ("adapters", "start", "adapted by"),
        "use `add_adapters`, or `load_pretrained(peft_config=)`, which initialise them",
    ),
    Reason(
        "a chunked loss of a head that says more than its weight",
        "ModelLossError",
        r"cannot be computed by impl='chunked'",
        lambda draw: _is(draw, loss="chunked", twist="hook on the head"),
        ("loss", "twist"),
        "leave `impl` of `prepare_loss` at `auto`, which computes the logits then",
    ),
    Reason(
        "a chunked loss of a head with trained tokens",
        "ModelLossError",
        r"cannot be computed by impl='chunked'",
        lambda draw: _is(draw, loss="chunked", adapters="lora and tokens"),
        ("loss", "adapters"),
        "leave `impl` of `prepare_loss` at `auto`, which computes the logits then",
        sometimes=True,
    ),
    Reason(
        "a router's loss of rows that ranks share",
        "ModelLossError",
        r"under context parallelism",
        lambda draw: (
            draw["mesh"].startswith("cp")
            and _is(draw, architecture="moe with router loss", loss=("auto", "chunked", "logits"))
        ),
        ("mesh", "architecture", "loss"),
        'call `prepare_loss(model, router_loss="off")`',
    ),
    Reason(
        "trained tokens, merged into an export",
        "UnsupportedModelError",
        r"whose base weights cannot be told apart here",
        lambda draw: draw["export"] != "no" and draw["adapters"] == "lora and tokens",
        ("export", "adapters"),
        "`export_adapter` writes the adapters alone; peft merges them",
    ),
    Reason(
        "attention by rows in a model that has only its own",
        "UnsupportedModelError",
        r"does not let it run 'sdpa'",
        lambda draw: _is(draw, varlen="yes", architecture=("soft cap", "float32 modules")),
        ("varlen", "architecture", "batches"),
        "leave `use_varlen_attention` out",
    ),
    Reason(
        "operations kept in blocks that have groups of their own",
        "UnsupportedModelError",
        r"sharded as a group of its own",
        lambda draw: _is(draw, sac=("operations", "2/3 operations")) and draw["expert ranks"] != "1",
        ("sac", "architecture", "start", "expert ranks"),
        "call `apply_sac` without `save=`, or leave these blocks out",
    ),
    Reason(
        "a pack on a model that does not keep its rows apart",
        "PackingError",
        r"not kept apart",
        lambda draw: (
            _is(draw, architecture="float32 modules", batches="packed") and not draw["mesh"].startswith("cp")
        ),
        ("architecture", "batches", "mesh"),
        "pad the rows, share them with context parallelism, or take a model whose layers look at positions",
    ),
    Reason(
        "a pack with an attention mask",
        "PackingError",
        r"attention_mask",
        lambda draw: _is(draw, batches="packed with a mask"),
        ("batches",),
        "leave the mask out, as `PackedCollator` does: `position_ids` say where rows begin",
    ),
    Reason(
        "rows shared by ranks, on a model that mixes positions outside of attention",
        "UnsupportedModelError",
        r"may meet in attention alone",
        lambda draw: draw["mesh"].startswith("cp") and _is(draw, architecture="convolution"),
        ("mesh", "architecture"),
        "train it without context parallelism",
    ),
    Reason(
        "ranks whose batches have different keys",
        "BatchError",
        r"different keys",
        lambda draw: _is(draw, twist="keys differ"),
        ("twist",),
        "give every rank's batch the same keys, with neutral values where there is nothing to say",
    ),
)


def applying(draw: Draw) -> list[Reason]:
    """The reasons for which a draw may be refused."""
    return [reason for reason in REASONS if reason.applies(draw)]


def of(error: str, message: str) -> list[Reason]:
    """The listed reasons that an error may give."""
    return [reason for reason in REASONS if reason.error == error and re.search(reason.message, message)]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "errors.md"

_HEAD = """## What is refused

<!-- Made by `python -m tests.compositions.reasons` from tests/compositions/reasons.py; change it there. -->

Features are tried together at random, each draw beside plain training in one process: it has to come out
equal, or be refused by one of these errors, before anything has been trained. Each is an `FsdpSftError`, and
its message says what was expected, what was got and what to do.

| What is refused | Error | Do this instead |
| --- | --- | --- |
"""


def page() -> str:
    """The page as it has to be."""
    rows = [f"| {_capital(r.name)} | `{r.error}` | {_capital(r.instead)} |" for r in REASONS]
    return PAGE.read_text().partition("## What is refused\n")[0] + _HEAD + "\n".join(rows) + "\n"


def _capital(sentence: str) -> str:
    return sentence if sentence.startswith("`") else sentence[0].upper() + sentence[1:]


if __name__ == "__main__":
    PAGE.write_text(page())
