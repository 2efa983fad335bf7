"""Loss and gradients of whole rows in parts, beside a plain model that gets each row by itself."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.architectures import quiet, tiny_architecture
from tests.harness.device import device_here, mesh_here
from tests.harness.float64 import AllFloat64
from tests.harness.long_rows import PACKED, PADDED, PLAIN, batch_of, plain_gradients, rows_of
from tests.harness.losses import with_loss
from tests.harness.models import full, tiny_model
from tests.harness.ranks import run_distributed

# kind -> lengths: rows longer than a rank's part and of one token, one rank without a target, filler
BATCHES = {PACKED: [5, 9, 1, 18, 4], PADDED: [11, 4, 1], PLAIN: [13]}


def _model(name: str, **overrides: Any) -> Any:
    with quiet():
        model = tiny_model(name, **overrides) if name.islower() else tiny_architecture(name)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped_mm takes no float64
    return model.double().train()


def _own(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(device_here()) for name, value in batch.items()}


def _check_exact(
    name: str, shape: dict[str, int], overrides: dict[str, Any], attention: str | None, kinds: list[str]
) -> None:
    fs.init_distributed(device_type=device_here().type)
    model = _model(name, **overrides)
    if attention == "eager":
        model.set_attn_implementation("eager")
    oracle = copy.deepcopy(model)
    model = model.to(device_here())
    mesh = mesh_here(**shape)
    fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(), master_dtype=torch.float64)
    if attention == "varlen":
        fs.use_varlen_attention(model)
    fs.use_context_parallel(model, mesh=mesh)
    share, shares = dist.get_rank() // shape["cp"], dist.get_world_size() // shape["cp"]
    with AllFloat64():
        for kind in kinds:
            per_share = [rows_of(BATCHES[kind], seed=seed) for seed in range(shares)]
            loss, gradients = plain_gradients(oracle, [row for rows in per_share for row in rows])
            batch = _own(batch_of(per_share[share], kind))
            for impl in ("chunked", "logits"):
                num_targets = fs.count_targets([batch], mesh=mesh)
                assert num_targets == sum(int((y[1:] != -100).sum()) for rows in per_share for _, y in rows)
                own = fs.causal_lm_loss(
                    with_loss(model, impl=impl, router_loss="off"), batch, num_targets=num_targets
                )
                own.backward()
                total = own.detach().double()
                dist.all_reduce(total)
                assert abs(total.item() / dist.get_world_size() - loss) < 1e-12 * abs(loss), (kind, impl)
                for parameter, tensor in model.named_parameters():
                    expected = gradients.get(parameter)
                    found = full(tensor.grad)
                    if expected is None or not expected.any():
                        assert found is None or not found.any(), parameter
                        continue
                    error = (found - expected).abs().max() / expected.abs().max()
                    assert error < 1e-12, (kind, impl, parameter, float(error))
                model.zero_grad(set_to_none=True)


def _exact(
    name: str, ranks: int, shape: dict[str, int], attention: str | None = None, **overrides: Any
) -> None:
    kinds = [PACKED] if attention == "varlen" else list(BATCHES)
    run_distributed(_check_exact, ranks, name, shape, overrides, attention, kinds)


FAMILIES = [
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",  # sliding windows
    "GptOssForCausalLM",  # sinks, one for each query head
    "DeepseekV3ForCausalLM",  # latent attention: values shorter than keys
]
MORE = [
    "Llama4ForCausalLM",  # chunked windows
    "Qwen3MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Cohere2ForCausalLM",
    "Glm4ForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "GraniteForCausalLM",
    "Phi3ForCausalLM",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_share_rows(name: str) -> None:
    _exact(name, 2, {"cp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_two_ranks_share_rows_of_more_families(name: str) -> None:
    _exact(name, 2, {"cp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_four_ranks_share_rows(name: str) -> None:
    """There are two key heads in most: each goes to two ranks."""
    _exact(name, 4, {"cp": 4})


def test_soft_caps() -> None:
    _exact("Gemma2ForCausalLM", 2, {"cp": 2}, "eager")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_by_the_length_of_the_row(kind: str) -> None:
    """Rows longer than the config's length: each rank has to know how long they are."""
    scaling: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    more: dict[str, Any] = {"max_position_embeddings": 8}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 5.0, 7.0]}
        scaling["original_max_position_embeddings"] = 8
        more = {"max_position_embeddings": 32}
    run_distributed(_check_exact, 2, "qwen3", {"cp": 2}, {"rope_parameters": scaling, **more}, None, [PLAIN])


def test_attention_by_row() -> None:
    _exact("qwen3", 2, {"cp": 2}, "varlen")


@pytest.mark.parametrize(
    ("ranks", "shape", "heads", "keys"),
    [
        (3, {"cp": 3}, 12, 4),  # key heads that straddle ranks
        (3, {"cp": 3}, 12, 3),
        (4, {"cp": 4}, 8, 1),
        (4, {"cp": 2, "dp_shard": 2}, 4, 2),
        (4, {"cp": 2, "dp_replicate": 2}, 4, 4),
    ],
)
def test_heads_and_meshes(ranks: int, shape: dict[str, int], heads: int, keys: int) -> None:
    """Query heads of 8, so that the hidden size is that of the heads."""
    _exact("qwen3", ranks, shape, num_attention_heads=heads, num_key_value_heads=keys, hidden_size=8 * heads)


def _check_refused() -> None:
    fs.init_distributed(device_type=device_here().type)
    mesh = mesh_here(cp=2)
    # Tokens that see later ones, positions counted by the mask, a recurrence.
    for name in ("ElectraForCausalLM", "OPTForCausalLM", "MambaForCausalLM"):
        model = _model(name).float().to(device_here())
        fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        with pytest.raises(fs.UnsupportedModelError, match="may meet in attention alone"):
            fs.use_context_parallel(model, mesh=mesh)


def test_models_that_compute_otherwise_in_parts_are_refused() -> None:
    run_distributed(_check_refused, 2)
