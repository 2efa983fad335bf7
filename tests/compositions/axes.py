"""What can be combined: the axes, the options of each, and a draw of one option an axis.

The first option of an axis is the plainest: what a failing draw is shrunk towards.
"""

from collections.abc import Mapping
from typing import Any

from tests.harness.native import has_native_sharding

# What the caller does between two steps that train.
BETWEEN = (
    *("nothing", "evaluate", "generate", "fail in a forward", "fail in a backward", "fail in the loss"),
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


def settled(draw: Draw) -> dict[str, str]:
    """The draw with options that mean nothing beside the others put to their plainest."""
    own = dict(draw)
    if own["odd rank"] != "none":  # among ranks of the library, which steps with a loss of its own
        own["loss"] = "auto"
        if own["architecture"] not in TRANSFORMERS_CAUSAL:
            own["architecture"] = "dense"

    def plainest(*axes: str) -> None:
        own.update({axis: AXES[axis][0] for axis in axes})

    if own["architecture"] == "not of transformers":  # no folder of Hugging Face to load from or export to
        plainest("start", "stored", "adapters", "varlen", "export", "vocabulary")
    if own["architecture"] not in TRANSFORMERS_CAUSAL:
        own["loss"] = "loss_fn"
        plainest("batches", "varlen", "adapters", "vocabulary")
        if own["twist"] == "hook on the head":
            plainest("twist")
    if own["architecture"] not in ("moe", "moe with router loss"):
        plainest("experts")
    if own["loss"] == "tokens" and own["loss terms"] != "weights":  # which such a loss can apply itself
        plainest("loss terms")
    if own["loss"] == "loss_fn":
        plainest("loss terms")  # which are then its own
        if own["mesh"].startswith("cp"):  # an argument that cannot be, and no typed error
            own["mesh"] = "fsdp 2"
    if own["mesh"] in ("single", "torch DDP 2"):  # the caller's own model, which nothing of ours has placed
        plainest("start", "vocabulary", "precision", "sharding")
    if own["mesh"] == "torch DDP 2" and own["resume"] == "other ranks":
        own["resume"] = "same ranks"
    if own["sac"] == "1/3 offloaded":
        plainest("compile")  # which offloaded blocks are refused with
    if own["compile"] != "no" and ROUTING & {own["architecture"]}:
        own["compile"] = "blocks"  # torch breaks the graph where tokens are dealt to experts
    if own["adapters"] == "dora" and ROUTING & {own["architecture"]}:
        own["adapters"] = "lora"  # peft has no DoRA for experts
    if own["compile"] == "fullgraph" and own["adapters"] == "dora":
        own["compile"] = "blocks"  # torch breaks the graph where peft asks for the type of a weight
    if own["compile"] != "no" and own["mesh"] in ("fsdp 3", "hsdp 2x2", "cp 2 fsdp 2"):
        own["mesh"] = "cp 2" if own["mesh"].startswith("cp") else "fsdp 2"  # every rank compiles for itself
        if own["resume"] == "other ranks":
            own["resume"] = "same ranks"
    if own["stored"] == "both names of a tie" and own["architecture"] not in ("tied", "sliding window"):
        plainest("stored")
    if own["stored"] == "fp8" and own["architecture"] not in TRANSFORMERS_CAUSAL - {"learned positions"}:
        plainest("stored")  # whose matrices have other names
    if own["start"] == "materialised":
        plainest("vocabulary")
        if own["stored"] != "bfloat16":
            plainest("stored")
    if own["adapters"] == "none" or own["start"] == "load_pretrained":
        plainest("adapted by")
    names_it = own["architecture"] in TRANSFORMERS_CAUSAL - {"learned positions"}
    if own["adapters"] == "none" or own["start"] == "materialised" or not names_it:
        plainest("frozen")
    if own["frozen"] != "in its dtype":  # which holds what the packed bytes do
        own["stored"] = "fp8" if own["frozen"] == "stored" else "float32"
    of_experts = own["architecture"] in ("moe", "moe with router loss")
    loaded = own["start"] == "load_pretrained"
    adapted = own["adapters"] != "none"  # all layers are, experts too, which ranks then cannot share out
    if not of_experts or not loaded or adapted or not has_native_sharding():
        plainest("expert ranks")
    if own["expert ranks"] != "1" and own["mesh"] not in ("fsdp 2", "hsdp 2x2"):
        own["mesh"] = "fsdp 2"  # others do not divide, which is an argument that cannot be
    if own["batches"] == "padded":
        plainest("varlen")
        if own["loader"] in ("sampler by cost", "stream"):  # they are for packs
            own["loader"] = "sampler of a mixture"
    if own["accumulation"] == "3 reduce_scatter" and own["mesh"] != "hsdp 2x2":
        own["accumulation"] = "3 last"
    if own["resume"] == "no":
        plainest("save")
    if own["twist"] == "keys differ" and (
        own["mesh"] in ("single", "1", "cp 2") or own["batches"] != "padded"
    ):
        plainest("twist")
    if own["odd rank"] != "none":
        plainest("resume", "save")
        if own["mesh"] not in ("fsdp 2", "fsdp 3", "hsdp 2x2", "replicas 2"):
            own["mesh"] = "fsdp 2"
    for gap in GAPS:
        if _means_nothing(own, gap):
            plainest(gap)
    return own


def _means_nothing(own: Mapping[str, str], gap: str) -> bool:
    """Whether what is done between two steps cannot be done in such a draw."""
    what, compiled = own[gap], own["compile"] != "no"
    by_torch = own["mesh"] == "torch DDP 2"
    return (
        # Compiled blocks compile anew for each length of the cache.
        (what == "generate" and (compiled or own["architecture"] not in TRANSFORMERS_CAUSAL))
        or (what == "a hook on a block" and compiled)
        or (what.startswith("fail") and (compiled or by_torch or gap == GAPS[0]))
        or (what == "freeze or thaw a block" and (compiled or by_torch))
        or (what == "load" and (own["resume"] == "no" or gap == GAPS[0]))
    )


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
