"""Mistakes with wrapped models, packs that nobody verified, and several meshes."""

from benchmarks.checks.mistakes.mistake import Mistake

WRAPPERS = ("tests/test_wrappers.py",)
HEADS = ("tests/loss/test_heads.py",)
MISTAKES: list[Mistake] = [
    Mistake(
        "ranks of DistributedDataParallel taken for single processes",
        "distributed.py",
        "return _mesh_over(replicas, model) if replicas is not None else None",
        "return None",
        WRAPPERS,
    ),
    Mistake(
        "a wrapper that hides its gradients let through",
        "_wrappers.py",
        "        if cls is not None:\n",
        "        if False:\n",
        WRAPPERS,
    ),
    Mistake(
        "the loss without logits does not look at what the forward makes of them",
        "loss/head.py",
        "    _check_transform(outputs[0], transform)\n",
        "",
        HEADS,
    ),
    Mistake(
        "hooks on the logits are not looked for",
        "loss/head.py",
        "if foreign_hooks(model.get_submodule(name), pre=name in inner):",
        "if False:",
        HEADS,
    ),
    Mistake(
        "DoRA's magnitude left out of the head",
        "loss/linear_head.py",
        "return _with_magnitude(layer, dora[0], joined) if dora else joined",
        "return joined",
        HEADS,
    ),
]
