"""Mistakes with vision-language models, odd layouts, and adapters of experts."""

from tests.mistakes.mistake import Mistake

TOWERS = (
    "tests/planner/test_planner.py::test_every_family_is_planned",
    "tests/planner/test_planner.py::test_it_is_the_text_model_and_shards_of_the_tower",
)
MISTAKES: list[Mistake] = [
    Mistake(
        "names of tied tensors are looked up as they are in the model",
        "weights/meta.py",
        "    keys = {name: next(iter(s.values()))[0] for name, (c, s) in matched.items() if c is None}\n",
        "    keys = {name: name for name in stored}\n",
        ("tests/weights/test_load.py::test_names_that_the_checkpoint_has_otherwise",),
    ),
    Mistake(
        "the bare class that a config names is built",
        "weights/meta.py",
        "    return str(with_head)\n",
        "    return architecture\n",
        ("tests/weights/test_odd_folders.py",),
    ),
    Mistake(
        "an export speaks of layers of predictions that it has not",
        "export/settings.py",
        "    for part, field in places if not found else ():\n",
        "    for part, field in ():\n",
        ("tests/export/test_further_predictions.py",),
    ),
    Mistake(
        "adapters are put into frozen towers",
        "_model/adapters.py",
        "    peft_config = _without_towers(peft_config, frozen_towers(model))\n",
        "",
        ("tests/model/test_towers.py",),
    ),
    Mistake(
        "blocks of frozen towers count for a fraction of blocks",
        "sac/apply.py",
        "if not unused.fullmatch(name)]",
        "]",
        ("tests/model/test_towers.py",),
    ),
    Mistake(
        "towers are frozen and not said to be",
        "weights/load.py",
        "towers = freeze_towers_of(model) if freeze_towers else []",
        "towers: list[str] = []",
        ("tests/model/test_towers.py",),
    ),
    Mistake(
        "of nested adapters the outermost alone is merged",
        "_model/adapters.py",
        "    for wrapper in layers:\n",
        "    for wrapper in layers[:1]:\n",
        ("tests/model/test_adapters.py::test_they_train_and_export_as_in_plain_peft",),
    ),
    Mistake(
        "adapters that peft does not merge are found when the export writes them",
        "export/plan.py",
        "        if kind in kinds or this_rank():\n",
        "        if kind not in kinds:\n",
        ("tests/export/test_adapters.py",),
    ),
    Mistake(
        "an export merges into the model's own layers",
        "_model/adapters.py",
        "    layers = _nested(with_tensors(layer, full))\n",
        "    layers = _nested(layer)\n",
        ("tests/export/test_adapters.py",),
    ),
    Mistake(
        "a config that was edited after the build is taken for the model's",
        "_model/twin.py",
        "    if record.config is None:\n",
        "    if record.config != fields:\n",
        ("tests/export/test_readback.py",),
    ),
    Mistake(
        "adapters of parameters are drawn with those of layers",
        "_model/adapters.py",
        'for fqn in sorted(layers, key=lambda fqn: _is_a(layers[fqn], "ParamWrapper")):',
        "for fqn in layers:",
        ("tests/model/test_adapters.py::test_they_train_and_export_as_in_plain_peft",),
    ),
    Mistake(
        "a cache is filled where a forward does not name it",
        "_model/forward.py",
        "taken = {} if inner is None else forward_parameters(inner)",
        "taken = {}",
        ("tests/model/test_inputs.py",),
    ),
    Mistake(
        "a text model's positions are those of images alone",
        "_model/forward.py",
        "partial(_spread, axes + 1)",
        "partial(_spread, axes)",
        ("tests/model/test_inputs.py",),
    ),
    Mistake(
        "the planner gathers towers",
        "planner/model.py",
        "return {name: block for name, block in find_blocks(model).items() if not name.startswith(unused)}",
        "return find_blocks(model)",
        TOWERS,
    ),
    Mistake(
        "a group that no forward has gathered ends a backward without a reduction",
        "step/update.py",
        "        allow_unused_groups(model)\n",
        "        pass\n",
        ("tests/model/test_towers.py",),
    ),
    Mistake(
        "a config is read as a type that the class is not of",
        "weights/meta.py",
        'if "architectures" in overrides or "model_type" in overrides:',
        'if "architectures" in overrides:',
        ("tests/model/test_configs.py",),
    ),
    Mistake(
        "the planner keeps towers in the masters' dtype",
        "planner/parameters.py",
        "run.kept_dtype(is_tower=self.is_tower)",
        "run.kept_dtype()",
        TOWERS,
    ),
]
