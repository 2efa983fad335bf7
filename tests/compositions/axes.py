"""What can be combined: the axes, the options of each, and a draw of one option an axis.

The first option of an axis is the plainest: what a failing draw is shrunk towards.
"""

from collections.abc import Mapping, Set
from typing import Any

# What the caller does between two steps that train.
FAILURES = ("fail in a forward", "fail in a backward", "fail in the loss")
BETWEEN = (
    *("nothing", "evaluate", *FAILURES),
    *("freeze or thaw a block", "a hook on a block", "another rate", "load"),
)
GAPS = tuple(f"before step {number}" for number in (1, 2, 3, 4))
# What one rank does at the second step, where the others train. A hook is none of it: what only watches a
# model, as `wandb.watch` does, is put on one rank, and what a hook does cannot be told.
DIFFERENCES = (
    *("none", "leaves a step out", "evaluates", "saves", "another rate", "another clip"),
    *("another block frozen", "one batch less", "another loss"),
)

AXES: dict[str, tuple[str, ...]] = {
    "architecture": (
        *("dense", "tied", "moe", "moe with router loss", "sliding window", "soft cap", "learned positions"),
        *("convolution", "float32 modules", "vision and text", "encoder-decoder"),
        "not of transformers",
    ),
    "start": ("materialised", "load_pretrained", "meta"),
    "stored": ("float32", "bfloat16", "both names of a tie", "fp8"),
    "mesh": (
        *("single", "1", "fsdp 2", "fsdp 3", "hsdp 2x2", "replicas 2", "torch DDP 2", "cp 2"),
        "cp 2 fsdp 2",
    ),
    "sharding": ("as needed", "kept after the forward", "offloaded"),
    "precision": ("float32", "bfloat16", "float16 with scaler"),
    "sac": ("0", "1/3", "1", "operations", "2/3 operations", "1/3 offloaded"),
    "compile": ("no", "blocks", "fullgraph"),
    "adapters": ("none", "lora", "dora", "lora and saved modules", "lora and tokens"),
    "adapted by": ("add_adapters", "peft"),
    "frozen": ("in its dtype", "nf4", "stored"),
    "loss": ("auto", "chunked", "logits", "loss_fn", "tokens"),
    "experts": ("grouped", "one by one"),
    "expert ranks": ("1", "2"),
    "loss terms": ("plain", "weights", "smoothing and z-loss"),
    "batches": ("padded", "packed", "packed with a mask"),
    "varlen": ("no", "yes"),
    "accumulation": ("1", "3 each", "3 last", "3 reduce_scatter"),
    "optimizer": ("sgd", "adamw", "muon and adamw", "stochastic adamw"),
    "clip": ("none", "1e-2"),
    "loader": (
        *("list", "sampler", "sampler and workers", "sampler of batches", "sampler of a mixture"),
        *("sampler by cost", "stream"),
    ),
    **dict.fromkeys(GAPS, BETWEEN),
    "odd rank": DIFFERENCES,
    "resume": ("no", "same ranks", "other ranks", "twice"),
    "save": ("synchronous", "asynchronous"),
    "export": ("no", "float32", "bfloat16", "into a full folder"),
    "vocabulary": ("as stored", "grown"),
    "twist": (
        "none",
        "hook on the head",
        "keys differ",
    ),
}

Draw = Mapping[str, str]

PLAINEST: Draw = {axis: options[0] for axis, options in AXES.items()}
TRANSFORMERS_CAUSAL = set(AXES["architecture"]) - {"encoder-decoder", "not of transformers"}
ROUTING = {"moe", "moe with router loss", "float32 modules"}
CAUSAL = {*TRANSFORMERS_CAUSAL, "not of transformers"}


def _all_but(axis: str, *options: str) -> set[str]:
    return set(AXES[axis]) - set(options)


def _plainest(*axes: str) -> dict[str, str]:
    return {axis: AXES[axis][0] for axis in axes}


_OURS = _all_but("mesh", "single", "torch DDP 2")
_COMPILED = _all_but("compile", "no")
_WITH_EXPERTS = {"moe", "moe with router loss"}
_LARGE = {"fsdp 3", "hsdp 2x2", "cp 2 fsdp 2"}
_ADAPTED = _all_but("adapters", "none")
_ODD = _all_but("odd rank", "none")

# Where a draw has one of these options of each of these axes, others mean nothing, or cannot be, and change.
RULES: tuple[tuple[Mapping[str, Set[str]], Mapping[str, str]], ...] = (
    # Among ranks of the library, which steps with a loss of its own.
    ({"odd rank": _ODD}, {"loss": "auto"}),
    # With these terms all ranks have a loss_fn, and nothing tells one function from another.
    ({"odd rank": {"another loss"}}, _plainest("loss terms")),
    (
        {"odd rank": _ODD, "architecture": _all_but("architecture", *TRANSFORMERS_CAUSAL)},
        {"architecture": "dense"},
    ),
    # No folder of Hugging Face to load from or export to.
    (
        {"architecture": {"not of transformers"}},
        _plainest("start", "stored", "adapters", "varlen", "export", "vocabulary"),
    ),
    (
        {"architecture": _all_but("architecture", *TRANSFORMERS_CAUSAL)},
        {"loss": "loss_fn", **_plainest("batches", "varlen", "adapters", "vocabulary")},
    ),
    (
        {"architecture": _all_but("architecture", *TRANSFORMERS_CAUSAL), "twist": {"hook on the head"}},
        _plainest("twist"),
    ),
    ({"architecture": _all_but("architecture", *_WITH_EXPERTS)}, _plainest("experts")),
    # A loss of the caller's has its own terms, and can apply weights itself.
    ({"loss": {"tokens"}, "loss terms": {"smoothing and z-loss"}}, _plainest("loss terms")),
    ({"loss": {"loss_fn"}}, _plainest("loss terms")),
    # An argument that cannot be, and no typed error.
    ({"loss": {"loss_fn"}, "mesh": {"cp 2", "cp 2 fsdp 2"}}, {"mesh": "fsdp 2"}),
    # The caller's own model, which nothing of ours has placed.
    ({"mesh": _all_but("mesh", *_OURS)}, _plainest("start", "vocabulary", "precision", "sharding")),
    ({"mesh": {"torch DDP 2"}, "resume": {"other ranks"}}, {"resume": "same ranks"}),
    # Offloaded blocks are refused with it.
    ({"sac": {"1/3 offloaded"}}, _plainest("compile")),
    # torch breaks the graph where tokens are dealt to experts.
    ({"compile": _COMPILED, "architecture": ROUTING}, {"compile": "blocks"}),
    # peft has no DoRA for experts.
    ({"adapters": {"dora"}, "architecture": ROUTING}, {"adapters": "lora"}),
    # torch breaks the graph where peft asks for the type of a weight.
    ({"compile": {"fullgraph"}, "adapters": {"dora"}}, {"compile": "blocks"}),
    # Every rank compiles for itself.
    ({"compile": _COMPILED, "mesh": _LARGE, "resume": {"other ranks"}}, {"resume": "same ranks"}),
    ({"compile": _COMPILED, "mesh": {"fsdp 3", "hsdp 2x2"}}, {"mesh": "fsdp 2"}),
    ({"compile": _COMPILED, "mesh": {"cp 2 fsdp 2"}}, {"mesh": "cp 2"}),
    (
        {
            "stored": {"both names of a tie"},
            "architecture": _all_but("architecture", "tied", "sliding window"),
        },
        _plainest("stored"),
    ),
    # Matrices of these have other names.
    (
        {
            "stored": {"fp8"},
            "architecture": {"learned positions", *_all_but("architecture", *TRANSFORMERS_CAUSAL)},
        },
        _plainest("stored"),
    ),
    ({"start": {"materialised"}}, _plainest("vocabulary")),
    ({"start": {"materialised"}, "stored": _all_but("stored", "bfloat16")}, _plainest("stored")),
    ({"adapters": {"none"}}, _plainest("adapted by", "frozen")),
    ({"start": {"load_pretrained"}}, _plainest("adapted by")),
    ({"start": {"materialised"}}, _plainest("frozen")),
    (
        {"architecture": {"learned positions", *_all_but("architecture", *TRANSFORMERS_CAUSAL)}},
        _plainest("frozen"),
    ),
    # What is stored holds what the packed bytes do.
    ({"frozen": {"stored"}}, {"stored": "fp8"}),
    ({"frozen": {"nf4"}}, {"stored": "float32"}),
    # Adapters are on all layers, experts too, which ranks then cannot share out.
    ({"adapters": _ADAPTED}, _plainest("expert ranks")),
    ({"start": _all_but("start", "load_pretrained")}, _plainest("expert ranks")),
    ({"architecture": _all_but("architecture", *_WITH_EXPERTS)}, _plainest("expert ranks")),
    # Other meshes do not divide, which is an argument that cannot be.
    ({"expert ranks": {"2"}, "mesh": _all_but("mesh", "fsdp 2", "hsdp 2x2")}, {"mesh": "fsdp 2"}),
    ({"batches": {"padded"}}, _plainest("varlen")),
    # These are for packs.
    ({"batches": {"padded"}, "loader": {"sampler by cost", "stream"}}, {"loader": "sampler of a mixture"}),
    (
        {"accumulation": {"3 reduce_scatter"}, "mesh": _all_but("mesh", "hsdp 2x2")},
        {"accumulation": "3 last"},
    ),
    ({"resume": {"no"}}, _plainest("save")),
    ({"twist": {"keys differ"}, "mesh": {"single", "1", "cp 2"}}, _plainest("twist")),
    ({"twist": {"keys differ"}, "batches": _all_but("batches", "padded")}, _plainest("twist")),
    ({"odd rank": _ODD}, _plainest("resume", "save")),
    (
        {"odd rank": _ODD, "mesh": _all_but("mesh", "fsdp 2", "fsdp 3", "hsdp 2x2", "replicas 2")},
        {"mesh": "fsdp 2"},
    ),
    # Between steps.
    *(
        (
            {gap: {*FAILURES, "a hook on a block", "freeze or thaw a block"}, "compile": _COMPILED},
            _plainest(gap),
        )
        for gap in GAPS
    ),
    *(
        ({gap: {*FAILURES, "freeze or thaw a block"}, "mesh": {"torch DDP 2"}}, _plainest(gap))
        for gap in GAPS
    ),
    *(({gap: {"load"}, "resume": {"no"}}, _plainest(gap)) for gap in GAPS),
    ({GAPS[0]: {*FAILURES, "load"}}, _plainest(GAPS[0])),
)


def settled(draw: Draw) -> dict[str, str]:
    """The draw with options that mean nothing beside the others put to their plainest."""
    own = dict(draw)
    for where, change in RULES:
        if all(own[axis] in options for axis, options in where.items()):
            own |= change
    return own


def differences(draw: Draw) -> dict[str, str]:
    """What is not plainest: enough to name a draw."""
    return {axis: option for axis, option in draw.items() if option != AXES[axis][0]}


def full(options: Mapping[str, Any]) -> dict[str, str]:
    """A draw from the options that are not plainest.

    Raises:
        ValueError: For an axis or option that there is not.
    """
    for axis, option in options.items():
        if option not in AXES.get(axis, ()):
            raise ValueError(f"no option {option!r} of {axis!r}; there is {AXES.get(axis, tuple(AXES))}")
    return {**PLAINEST, **options}
