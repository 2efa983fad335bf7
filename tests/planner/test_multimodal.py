"""Configs of vision-language models: planned as what text uses, with towers that are only held."""

import pytest
import transformers as tf

import fsdp_sft as fs
from fsdp_sft._model.blocks import towers_of
from fsdp_sft.planner.model import build_skeleton
from tests.harness.multimodal import CONFIGS, TEXT, tiny

RUN = fs.Run(num_gpus=2, micro_batch_size=2, seq_length=64)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_planned(family: str) -> None:
    model, config = tiny(family), CONFIGS[family]()
    skeleton = build_skeleton(config, RUN)
    towers = {p for name in towers_of(model) for p in model.get_submodule(name).parameters()}
    planned = [one for group in skeleton.towers for one in group.parameters]
    assert sum(one.elements for one in planned) == sum(p.numel() for p in towers)
    assert not any(one.trained for one in planned)
    assert skeleton.parameters == sum(p.numel() for p in model.parameters())
    assert len(skeleton.blocks) == config.get_text_config().num_hidden_layers
    assert fs.estimate_memory(config, RUN).peak_bytes > 0


def test_it_is_the_text_model_and_shards_of_the_tower() -> None:
    whole = fs.estimate_memory(CONFIGS["llava"](), RUN)
    text = fs.estimate_memory(tf.LlamaConfig(**TEXT), RUN)
    skeleton = build_skeleton(CONFIGS["llava"](), RUN)
    towers = sum(one.elements for group in skeleton.towers for one in group.parameters)
    more = {name: size - text.breakdown.get(name, 0) for name, size in whole.breakdown.items()}
    held = more.pop("parameters (shards)")
    assert held == pytest.approx(towers * 2 / RUN.num_gpus, rel=0.05)
    assert not any(more.values()), more
