"""Which layers are tried: as many as there is the room and the time for."""

import dataclasses
from unittest import mock

import pytest
import torch
import transformers as tf

from fsdp_sft.check import layers
from fsdp_sft.check.cluster import Cluster
from tests.harness.clusters import cluster_of
from tests.harness.models import TINY

MIXTURE = tf.Qwen3MoeConfig(
    **TINY, num_hidden_layers=4, num_experts=64, num_experts_per_tok=2, moe_intermediate_size=16
)
FULL = layers.parameters_of(layers.few_layers(MIXTURE))


def _cluster() -> Cluster:
    cluster = cluster_of("a")
    return dataclasses.replace(cluster, asked=dataclasses.replace(cluster.asked, config=MIXTURE))


@pytest.mark.parametrize(
    ("room", "rate", "experts", "says"),
    [
        (None, 1e12, 64, ""),
        (FULL, 1e12, 64, ""),
        (FULL - 1, 1e12, 4, ""),
        (FULL // 20, 1e12, None, "2 layers of it take about 0.0 GiB, and less is free"),
        (FULL, FULL * 20.0, 4, ""),  # 90 s for all experts, of which 60 may be taken
        (FULL, FULL * 0.2, None, "s in float32; try --seconds"),
    ],
)
def test_a_mixture_has_fewer_experts_before_nothing_is_tried(
    room: int | None, rate: float, experts: int | None, says: str
) -> None:
    with mock.patch.object(layers, "_flops_per_second", return_value=rate):
        config, why_not = layers.fitting_layers(_cluster(), torch.float32, parameter_bytes=1, room=room)
        is_in_time = layers.is_in_time(_cluster(), config, torch.float32)
    assert says in why_not
    assert bool(says) == bool(why_not)
    if experts is not None:
        assert config.num_experts == experts
        assert is_in_time
