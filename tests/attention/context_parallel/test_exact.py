"""Loss and gradients of whole rows in parts, beside a plain model that gets each row by itself."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.architectures import class_names, quiet, tiny_architecture
from tests.harness.long_rows import PACKED, PADDED, PLAIN, batch_of, plain_gradients, rows_of, sharing_rows
from tests.harness.losses import gradients_of, with_loss
from tests.harness.models import FLOAT32, AllFloat64, tiny_model
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed

# kind -> lengths: rows longer than a rank's part and of one token, one rank without a target, filler
BATCHES = {PACKED: [5, 9, 1, 18, 4], PADDED: [11, 4, 1], PLAIN: [13]}


def shared_gradients(
    model: Any, mesh: Any, batch: dict[str, torch.Tensor], **loss: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a model whose ranks share rows, over all ranks, and its gradients by name."""
    batch = {name: value.to(device_here()) for name, value in batch.items()}
    num_targets = fs.count_targets([batch], mesh=mesh)
    own = fs.causal_lm_loss(with_loss(model, router_loss="off", **loss), batch, num_targets=num_targets)
    own.backward()
    total = own.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size(), gradients_of(model)


def largest_differences(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> list[tuple[str, float, float]]:
    """(name, largest difference, largest element) of each gradient; one that is missing is 0."""
    zero = torch.zeros(())
    pairs = [
        (name, found.get(name, zero), expected.get(name, zero)) for name in found.keys() | expected.keys()
    ]
    return [(name, float((a - b).abs().max()), float(b.abs().max())) for name, a, b in pairs]


def _model(name: str, **overrides: Any) -> Any:
    with quiet():
        model = tiny_model(name, **overrides) if name.islower() else tiny_architecture(name)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped_mm takes no float64
    return model.double().train()


Apart = tuple[float, str, str, str]  # a relative difference, the batch, the loss's way, and of what it is


def _check_exact(
    name: str, shape: dict[str, int], overrides: dict[str, Any], attention: str | None, kinds: list[str]
) -> Apart:
    """The largest relative difference from one process, and where it is."""
    model = _model(name, **overrides)
    if attention == "eager":
        model.set_attn_implementation("eager")
    oracle = copy.deepcopy(model)
    model = model.to(device_here())
    mesh = mesh_here(**shape)
    fs.shard_model(model, mesh=mesh, mp_policy=FLOAT32, master_dtype=torch.float64)
    if attention == "varlen":
        fs.use_varlen_attention(model)
    fs.use_context_parallel(model, mesh=mesh)
    share, shares = dist.get_rank() // shape["cp"], dist.get_world_size() // shape["cp"]
    apart: list[Apart] = []
    with AllFloat64():
        for kind in kinds:
            per_share = [rows_of(BATCHES[kind], seed=seed) for seed in range(shares)]
            loss, gradients = plain_gradients(oracle, [row for rows in per_share for row in rows])
            batch = batch_of(per_share[share], kind)
            assert fs.count_targets([batch], mesh=mesh) == sum(
                int((y[1:] != -100).sum()) for rows in per_share for _, y in rows
            )
            for impl in ("chunked", "logits"):
                own, found = shared_gradients(model, mesh, batch, impl=impl)
                apart.append((abs(own - loss) / abs(loss), kind, impl, "loss"))
                apart += [
                    (difference / (size or 1.0), kind, impl, parameter)
                    for parameter, difference, size in largest_differences(found, gradients)
                ]
    return max(apart)


def _exact(
    name: str, ranks: int, shape: dict[str, int], attention: str | None = None, **overrides: Any
) -> Apart:
    kinds = [PACKED] if attention == "varlen" else list(BATCHES)
    return max(run_distributed(_check_exact, ranks, name, shape, overrides, attention, kinds))


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


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_two_ranks_share_rows(name: str) -> None:
    assert _exact(name, 2, {"cp": 2})[0] <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_four_ranks_share_rows(name: str) -> None:
    """There are two key heads in most: each goes to two ranks."""
    assert _exact(name, 4, {"cp": 4})[0] <= 1e-12


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 5.0, 7.0]}


@pytest.mark.parametrize(
    ("kind", "longest", "more"),
    [("dynamic", 8, {}), ("longrope", 32, {**FACTORS, "original_max_position_embeddings": 8})],
    ids=["dynamic", "longrope"],
)
def test_rotations_by_the_length_of_the_row(kind: str, longest: int, more: dict[str, Any]) -> None:
    """Rows longer than the config's length: each rank has to know how long they are."""
    scaling = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, **more}
    options = {"rope_parameters": scaling, "max_position_embeddings": longest}
    assert max(run_distributed(_check_exact, 2, "qwen3", {"cp": 2}, options, None, [PLAIN]))[0] <= 1e-12


def _heads(queries: int, keys: int) -> dict[str, int]:
    """Query heads of 8, so that the hidden size is that of the heads."""
    return {"num_attention_heads": queries, "num_key_value_heads": keys, "hidden_size": 8 * queries}


@pytest.mark.parametrize(
    ("name", "ranks", "shape", "attention", "overrides"),
    [
        ("Gemma2ForCausalLM", 2, {"cp": 2}, "eager", {}),  # soft caps
        ("qwen3", 2, {"cp": 2}, "varlen", {}),
        ("qwen3", 3, {"cp": 3}, None, _heads(12, 4)),  # key heads that straddle ranks
        ("qwen3", 3, {"cp": 3}, None, _heads(12, 3)),
        ("qwen3", 4, {"cp": 4}, None, _heads(8, 1)),
        ("qwen3", 4, {"cp": 2, "dp_shard": 2}, None, _heads(4, 2)),
        ("qwen3", 4, {"cp": 2, "dp_replicate": 2}, None, _heads(4, 4)),
    ],
    ids=["soft caps", "by row", "12-4", "12-3", "8-1", "4-2", "4-4"],
)
def test_attentions_heads_and_meshes(
    name: str, ranks: int, shape: dict[str, int], attention: str | None, overrides: dict[str, int]
) -> None:
    assert _exact(name, ranks, shape, attention, **overrides)[0] <= 1e-12


@on_ranks(2)
def test_models_that_compute_otherwise_in_parts_are_refused() -> None:
    mesh = mesh_here(cp=2)
    # Tokens that see later ones, positions counted by the mask, a recurrence.
    for name in ("ElectraForCausalLM", "OPTForCausalLM", "MambaForCausalLM"):
        model = fs.shard_model(_model(name).float().to(device_here()), mesh=mesh, mp_policy=FLOAT32)
        with pytest.raises(fs.UnsupportedModelError, match="may meet in attention alone"):
            fs.use_context_parallel(model, mesh=mesh)


# --- float32 and bfloat16: rows in parts differ from whole ones by rounding, and by no more of it ---


def _plain(model: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the same batch, whole, in a process."""
    logits = model(**{n: v for n, v in batch.items() if n != "labels"}, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten()
    )
    loss.backward()
    return loss.item(), gradients_of(model)


def _apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """How far gradients are apart over their size, in the norm over all parameters."""
    pairs = [(found[name].double(), of.double()) for name, of in expected.items()]
    error, size = (
        torch.stack(norms).norm()
        for norms in zip(*(((a - b).norm(), b.norm()) for a, b in pairs), strict=True)
    )
    return float(error / size)


def _distances(name: str, dtype: torch.dtype) -> dict[str, list[tuple[float, float]]]:
    """Of rows in parts and of a plain process, how far loss and gradients of batches are from float64."""
    with quiet():
        model = tiny_architecture(name).float().train()
    # What both compute with are the rounded weights.
    truth, plain = copy.deepcopy(model).to(dtype).double(), copy.deepcopy(model).to(dtype)
    mesh = mesh_here(cp=2)
    sharing_rows(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    found: dict[str, list[tuple[float, float]]] = {"in parts": [], "plain": []}
    for seed in range(4):
        rows = rows_of([9, 23, 1, 14, 17], seed=seed)
        with AllFloat64():
            loss, gradients = plain_gradients(truth, rows)
        batch = batch_of(rows, PACKED if seed % 2 else PADDED)
        for who, (own, of) in {
            "in parts": shared_gradients(model, mesh, batch),
            "plain": _plain(plain, batch),
        }.items():
            found[who].append((abs(own - loss) / loss, _apart(of, gradients)))
    return found


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_rounding_is_that_of_a_plain_process(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = run_distributed(_distances, 2, name, dtype)[0]
        loss, parts, plain = (
            sum(one[index] ** 2 for one in found[who]) ** 0.5 / 2
            for who, index in (("in parts", 0), ("in parts", 1), ("plain", 1))
        )
        print(f"{name}, {dtype}: loss {loss:.1e}, gradients {parts:.2e}, of a plain process {plain:.2e}")
        assert 0 < parts < 1.15 * plain
        assert loss < 4 * torch.finfo(dtype).eps


# --- every causal language model of transformers: exact in parts, or refused by name ------------------------

REASONS = (
    r"query heads|context parallelism runs around|does not let|computes something else on parts"
    r"|cannot run on parts of a row|differs on another rank"
)


def _judge(name: str) -> str:
    """``"exact"``, or why the model was refused.

    Raises:
        AssertionError: If it is neither.
    """
    fs.init_distributed(device_type="cpu")
    with quiet():
        try:
            model = _model(name).eval()  # some have dropout
        except ValueError as error:
            return f"plain transformers cannot: {error}"
        oracle = copy.deepcopy(model)
        mesh = mesh_here(cp=2)
        try:
            fs.shard_model(model, mesh=mesh, mp_policy=FLOAT32, master_dtype=torch.float64)
        except fs.FsdpSftError as error:
            return f"not sharded: {error}"
        try:
            fs.use_context_parallel(model, mesh=mesh)
        except (ValueError, fs.UnsupportedModelError) as error:
            return str(error)
        with AllFloat64():
            for kind, lengths in ((PLAIN, [14]), (PADDED, [11, 5])):
                rows = rows_of(lengths, seed=1)
                try:
                    loss, gradients = plain_gradients(oracle, rows)
                except Exception as error:
                    return f"plain transformers cannot: {error}"
                try:
                    own, found = shared_gradients(model, mesh, batch_of(rows, kind))
                except fs.ModelLossError as error:
                    return f"no causal loss: {error}"
                assert abs(own - loss) < 1e-9 * abs(loss), (kind, own, loss)
                differences = largest_differences(found, gradients)
                largest = max(size for _, _, size in differences)
                for parameter, apart, size in differences:
                    assert apart < max(1e-8 * size, 1e-12 * largest), (kind, parameter, apart)
    return "exact"


@pytest.mark.slow
@pytest.mark.parametrize("name", class_names())
def test_it_is_exact_or_refused(name: str) -> None:
    verdicts = run_distributed(_judge, 2, name)
    print(f"{name}: {verdicts[0][:200]}")
    assert all(
        verdict == "exact"
        or verdict.startswith(("not sharded", "plain", "no causal"))
        or re.search(REASONS, verdict)
        for verdict in verdicts
    ), verdicts
