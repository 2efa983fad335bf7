"""Mistakes with wrapped models, packs that nobody verified, and several meshes."""

from benchmarks.checks.mistakes.mistake import Mistake

PACKS = ("tests/packing/test_first_use.py",)
WRAPPERS = ("tests/test_wrappers.py",)
HEADS = ("tests/loss/test_heads.py",)
MISTAKES: list[Mistake] = [
    Mistake(
        "a rank chooses its loss anew although the others do not",
        "step/train.py",
        "    if window.stale:",
        "    if False:",
        ("tests/loss/test_heads.py",),
    ),
    Mistake(
        "a cap on attention scores left out where transformers' sdpa does not refuse it",
        "varlen/attention.py",
        'if others.get("softcap") is not None:',
        "if False:",
        ("tests/varlen/test_varlen.py",),
    ),
    Mistake(
        "the scaler decides for each optimizer alone",
        "step/train.py",
        "skipped=step.has_infs or not step.is_finite",
        "skipped=False",
        ("tests/step/test_optimizers.py",),
    ),
    Mistake(
        "a parameter in two optimizers",
        "step/optimizers.py",
        "            if other != number:\n",
        "            if False:\n",
        ("tests/step/test_optimizers.py",),
    ),
    Mistake(
        "norms of several meshes added instead of squared",
        "step/gradients.py",
        "norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)",
        "norm = torch.stack(norms).sum()",
        ("tests/step/test_meshes.py",),
    ),
    Mistake(
        "a pack on a model that nobody has verified is trained",
        "step/train.py",
        'if verify == "first" and any(map(may_be_packs, window.keys)):',
        "if False:",
        PACKS,
    ),
    Mistake(
        "a rank verifies by its own packs alone",
        "packing/first_use.py",
        "for _, size in gather_over_mesh(own, mesh)]",
        "for size in [own]]",
        PACKS,
    ),
    Mistake(
        "rotations of a pack not compared before they are rounded",
        "packing/verify.py",
        "if report.rotation > _ROTATION_TOLERANCE:",
        "if False:",
        PACKS,
    ),
    Mistake(
        "a pack with a mask is let through",
        "collate/packs.py",
        "        if bool((places[seen].diff() != 1).any()):\n",
        "        if False:\n",
        PACKS,
    ),
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
        "            losses[:1] = [_checked(loss, outputs[-1], transform) for loss in losses[:1]]",
        "            pass",
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
    Mistake(
        "an uneven dimension taken other than the first",
        "_placement.py",
        "if dim and size % num_shards == 0), 0)",
        "if dim and size >= num_shards), 0)",
        ("tests/test_placement.py",),
    ),
    Mistake(
        "another dimension on the smaller mesh of reshard_after_forward",
        "shard.py",
        'smaller_mesh = type(kwargs.get("reshard_after_forward")) is int',
        "smaller_mesh = False",
        ("tests/test_placement.py",),
    ),
    Mistake(
        "copies of parameters cut elsewhere left out of the plan",
        "planner/replay.py",
        "moved=sum(group.moved(shards)) * compute,",
        "moved=0,",
        ("tests/planner/test_tracker.py",),
    ),
]
