"""Ranks that have experts of their own: models that transformers shards, beside one process."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from peft import LoraConfig
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.distributed import DistributedConfig

import fsdp_sft as fs
from fsdp_sft._tensors.boxes import local_of
from tests import plain
from tests.harness.architectures import quiet, tiny_architecture
from tests.harness.composed import composed
from tests.harness.models import FLOAT32, full, largest_error, ragged_batches
from tests.harness.ranks import mesh_here, on_ranks, run_distributed
from tests.harness.trained import assert_same, everything

# Each with 8 experts, so that 2 and 4 ranks have whole ones.
EIGHT = {
    "MixtralForCausalLM": {"num_local_experts": 8},
    "Qwen3MoeForCausalLM": {"num_experts": 8},
    "GptOssForCausalLM": {"num_local_experts": 8},
    "DeepseekV3ForCausalLM": {
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
}
EP2 = {"fsdp_size": 4, "ep_size": 2}
EP4 = {"fsdp_size": 4, "ep_size": 4}
FSDP = {"fsdp_size": 4}
OURS2 = {"ours": 2, "fsdp_size": 4}
OURS4 = {"ours": 4, "fsdp_size": 4}
HYBRID = {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}
FIRST, SECOND = range(2), range(2, 4)  # steps before a checkpoint and after it


def save_mixture(folder: Path, name: str = "MixtralForCausalLM", **overrides: Any) -> str:
    """A tiny mixture in the format of the Hub; fields of its config as ``overrides``."""
    with quiet():
        model = tiny_architecture(name)
        if overrides:
            torch.manual_seed(0)
            for field, value in overrides.items():
                setattr(model.config, field, value)
            model = type(model)(model.config)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
    return os.fspath(folder)


def load_native(folder: str, options: dict[str, Any] | None, *, dtype: torch.dtype = torch.float32) -> Any:
    """Load a folder as transformers does: sharded by ``DistributedConfig(**options)``, or plainly for None.

    In float64 experts are run by an implementation that takes it.
    """
    more: dict[str, Any] = {}
    if options is not None:
        more["distributed_config"] = DistributedConfig(**options)
    if dtype == torch.float64:
        more["experts_implementation"] = "eager"
    with quiet():
        return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more).train()


def rows_of_rank(batches: list[Any], options: dict[str, Any]) -> list[Any]:
    """The batches of this rank, where those along ``tp`` have the same."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shares = options.get("fsdp_size", 1) * options.get("dp_replicate_size", 1)
    return batches[rank * shares // ranks :: shares]


@pytest.fixture(scope="module")
def folder(request: Any, tmp_path_factory: Any) -> str:
    return save_mixture(tmp_path_factory.mktemp("mixture"), request.param, **EIGHT[request.param])


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: Any) -> str:
    name = "MixtralForCausalLM"
    return save_mixture(tmp_path_factory.mktemp("mixture"), name, **EIGHT[name])


def _load(folder: str, options: dict[str, int] | None, dtype: torch.dtype = torch.float32) -> Any:
    """By transformers, or with ``ours`` by this library: so many ranks share out the experts."""
    if options is None or "ours" not in options:
        return load_native(folder, options, dtype=dtype)
    return composed(
        folder,
        mesh=mesh_here(dp_replicate=options.get("dp_replicate_size", 1)),
        master_dtype=dtype,
        mp_policy=FLOAT32,
        ep_size=options["ours"],
    )


def _check_replicas(model: Any) -> None:
    """FSDP2 keeps replicas equal by equal gradients, and nothing else does."""
    for parameter in model.parameters():
        own = parameter.detach().to_local()
        other = own.clone()
        dist.broadcast(other, group=parameter.device_mesh.get_group(0), group_src=0)
        assert torch.equal(own, other)


MOST = {"ep2": EP2, "ours2": OURS2, "ours4": OURS4}
OTHERS = {
    "float64": (EP2, torch.float64, "logits"),
    "ep4": (EP4, torch.float32, "logits"),
    "fsdp": (FSDP, torch.float32, "logits"),
    "replicas": (HYBRID, torch.float32, "logits"),
    "ours, replicas": ({"ours": 2, "dp_replicate_size": 2, "fsdp_size": 2}, torch.float32, "logits"),
    "last": (EP2, torch.float32, "sac last"),
}


@pytest.mark.parametrize(
    ("folder", "options", "dtype", "prepare"),
    [
        *(
            pytest.param(name, options, torch.float32, "sac chunked", id=f"{name}-{how}")
            for name, (how, options) in itertools.product(EIGHT, MOST.items())
        ),
        *(pytest.param("MixtralForCausalLM", *way, id=how) for how, way in OTHERS.items()),
        pytest.param("MixtralForCausalLM", EP2, torch.float32, "compile sac", marks=pytest.mark.slow),
    ],
    indirect=["folder"],
)
@on_ranks(4)
def test_a_step_is_that_of_one_process(
    folder: str, options: dict[str, int], dtype: torch.dtype, prepare: str
) -> None:
    """One step of SGD with rate 1, whose move is the clipped gradient."""
    batches, model = ragged_batches(9)[:8], _load(folder, options, dtype)
    if "sac" in prepare:
        fs.apply_sac(model, 1)
    if "compile" in prepare:
        fs.compile_blocks(model, backend="aot_eager")
    before = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    fs.prepare_loss(model, impl="chunked" if "chunked" in prepare else "logits", router_loss="off")
    result = fs.train_step(
        model,
        rows_of_rank(batches, options),
        torch.optim.SGD(model.parameters(), lr=1.0),
        max_grad_norm=0.05,
        grad_sync="last" if "last" in prepare else "each",
    )
    exact = dtype == torch.float64
    beside, gradients = load_native(folder, None, dtype=dtype), dict[str, torch.Tensor]()
    loss, norm = plain.step(beside, [plain.mean_loss(beside, batches)], [], max_norm=0.05, keep=gradients)
    assert (result.loss, result.grad_norm) == pytest.approx((loss, norm), rel=1e-12 if exact else 1e-5)
    assert norm > 0.05, "it is clipped"
    moved = {name: before[name] - full(p.detach()) for name, p in model.named_parameters()}
    assert not any(moved.pop(name).any() for name in moved.keys() - gradients.keys())
    assert largest_error(moved, gradients) <= (1e-12 if exact else 5e-5)
    if "dp_replicate_size" in options:
        _check_replicas(model)


def _optimizer(model: Any) -> torch.optim.Optimizer:
    # Adam divides by how large a gradient is: rounding would count like a gradient where there is none.
    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-3)


def _window(step: int, options: dict[str, int] | None) -> list[Any]:
    batches = ragged_batches(9, seed=step)[:8]
    return batches if options is None else rows_of_rank(batches, options)


def _train(model: Any, optimizer: Any, steps: range, options: dict[str, int] | None) -> list[float]:
    fs.prepare_loss(model, router_loss="micro_batch")
    return [fs.train_step(model, _window(step, options), optimizer).loss for step in steps]


def _save_half_way(folder: str, root: str, options: dict[str, int]) -> tuple[list[float], Any, Any]:
    model = _load(folder, options)
    fs.apply_sac(model, 1)
    optimizer = _optimizer(model)
    losses = _train(model, optimizer, FIRST, options)
    fs.save_checkpoint(f"{root}/ckpt", FIRST.stop, model=model, optimizer=optimizer)
    half = everything(model, optimizer)
    losses += _train(model, optimizer, SECOND, options)
    fs.export_hf(model, f"{root}/hf", dtype=None)
    return losses, half, everything(model, optimizer)


def _resume(folder: str, root: str, options: dict[str, int] | None) -> tuple[Any, list[float], Any]:
    model = _load(folder, options)
    optimizer = _optimizer(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fs.load_checkpoint(f"{root}/ckpt", model=model, optimizer=optimizer)
    half = everything(model, optimizer)
    return half, _train(model, optimizer, SECOND, options), everything(model, optimizer)


def _weights(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if name.startswith("model/")}


def test_steps_resumed_otherwise_and_exported_are_those_of_one_process(mixtral: str, tmp_path: Path) -> None:
    """From experts over 2 ranks, twice, to FSDP alone, and to one process."""
    losses, half, last = run_distributed(_save_half_way, 4, mixtral, str(tmp_path), EP2)[0]
    beside = load_native(mixtral, None)
    optimizer = _optimizer(beside)
    expected = _train(beside, optimizer, range(SECOND.stop), None)
    assert losses == pytest.approx(expected, rel=2e-5)
    assert largest_error(_weights(last), _weights(everything(beside, optimizer))) <= 2e-4
    continued = [run_distributed(_resume, 4, mixtral, str(tmp_path), other)[0] for other in (FSDP, OURS2)]
    continued.append(_resume(mixtral, str(tmp_path), None))
    for loaded, resumed, final in continued:
        assert_same(loaded, half)
        assert resumed == pytest.approx(expected[SECOND.start :], rel=2e-5)
        assert largest_error(_weights(final), _weights(last)) <= 2e-4
    _check_export(tmp_path / "hf", Path(mixtral), last)


def _check_export(made: Path, original: Path, expected: dict[str, torch.Tensor]) -> None:
    """The original's names and shapes, and plain transformers reads what was trained."""
    files = [[load_file(file) for file in folder.glob("*.safetensors")] for folder in (made, original)]
    shapes = [{name: t.shape for tensors in loaded for name, t in tensors.items()} for loaded in files]
    assert shapes[0] == shapes[1]
    assert "model.layers.0.block_sparse_moe.experts.7.w1.weight" in shapes[0]
    read = load_native(str(made), None)
    assert all(torch.equal(p.detach(), expected[f"model/{name}"]) for name, p in read.named_parameters())
    assert json.loads((made / "config.json").read_text()).get("distributed_config") is None


@pytest.mark.parametrize(("ep_size", "replicas"), [(2, 1), (4, 1), (2, 2)])
@on_ranks(4)
def test_each_rank_reads_its_own_experts_and_every_byte_is_read_once(
    mixtral: str, ep_size: int, replicas: int
) -> None:
    model = _load(mixtral, {"ours": ep_size, "dp_replicate_size": replicas})
    report = model.load_report
    assert report.job_bytes_read == report.checkpoint_bytes
    mine = sum(local_of(p).nbytes for p in model.parameters())
    # With replicas one reads for both, tensor by tensor in turn.
    assert report.bytes_read == pytest.approx(mine / replicas, rel=0 if replicas == 1 else 0.2)
    found = {name: full(tensor) for name, tensor in model.state_dict().items()}
    assert_same(found, load_native(mixtral, None).state_dict())
    assert "efsdp" not in fs.describe_sharding(model).splitlines()[-1]


def _check_refused(mixtral: str, without: str, dense: str) -> None:
    mesh, half = mesh_here(), MixedPrecisionPolicy(param_dtype=torch.float16)
    copied = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["experts"], task_type="CAUSAL_LM")
    adapted = LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"], task_type="CAUSAL_LM")
    unsupported, twice = fs.UnsupportedModelError, "would divide gradients of experts by the ranks twice"
    cases: list[tuple[str, dict[str, Any], type[Exception], str]] = [
        (mixtral, {"ep_size": 3}, ValueError, r"use one of \[1, 2, 4\]"),
        (mixtral, {"ep_size": 0}, ValueError, r"use one of \[1, 2, 4\]"),
        (without, {}, unsupported, "no plan by which ranks share out the experts"),
        (dense, {}, unsupported, "no plan by which ranks share out the experts"),
        (mixtral, {"mesh": mesh_here(cp=2)}, ValueError, "without cp"),
        (mixtral, {"peft_config": copied}, unsupported, "cannot share out experts that peft"),
        (mixtral, {"peft_config": adapted}, unsupported, "cannot share out experts that peft"),
        (mixtral, {"ep_size": 4, "mp_policy": half}, ValueError, twice),
        (mixtral, {"mesh": mesh_here(dp_replicate=2), "mp_policy": half}, ValueError, twice),
    ]
    for folder, options, error, message in cases:
        with pytest.raises(error, match=message):
            composed(folder, **{"mesh": mesh, "ep_size": 2, **options})
    with pytest.raises(unsupported, match="group of its own"):
        fs.apply_sac(composed(mixtral, mesh=mesh, ep_size=2), save="self_attn")
    with pytest.raises(unsupported, match="that ranks share out by ep_size") as early:
        composed(mixtral, mesh=mesh, ep_size=2, sac_ratio=1, sac={"save": "self_attn"})
    assert "load_weights" not in [entry.name for entry in early.traceback]
    with pytest.raises(ValueError, match="ep_size=2 needs a model on the meta device"):
        fs.shard_model(tiny_architecture("MixtralForCausalLM"), mesh=mesh, ep_size=2)


def test_what_cannot_be_shared_out_is_refused_by_name(mixtral: str, tmp_path: Path) -> None:
    without = save_mixture(tmp_path / "llama4", "Llama4ForCausalLM")
    dense = save_mixture(tmp_path / "llama", "LlamaForCausalLM")
    run_distributed(_check_refused, 4, mixtral, without, dense)


@on_ranks(4)
def test_adapters_are_trained_beside_shared_experts(mixtral: str, tmp_path: Path) -> None:
    """Beside ranks that gather all experts: steps, and the loss without the adapters."""
    batches = rows_of_rank(ragged_batches(8), OURS2)
    results = []
    for ep_size in (1, 2):
        model = composed(
            mixtral,
            mesh=mesh_here(),
            peft_config=LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
            frozen_dtype=torch.float32,
            mp_policy=FLOAT32,
            sac_ratio=1,
            ep_size=ep_size,
        )
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        steps = [fs.train_step(model, batches, optimizer) for _ in range(2)]
        trained = {n: full(p.detach()) for n, p in model.named_parameters() if p.requires_grad}
        with model.disable_adapter():
            base = fs.evaluate(model, batches).loss
        results.append(([step.loss for step in steps] + [base], trained))
    out = fs.export_hf(model, tmp_path / "out", dtype=None)
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    assert base == pytest.approx(steps[0].loss, rel=1e-5)
    assert steps[1].loss < steps[0].loss
    assert largest_error(results[1][1], results[0][1]) <= 1e-4
    load_native(str(out), None)


@pytest.mark.parametrize("options", [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}])
@on_ranks(2)
def test_layers_that_ranks_share_are_refused(mixtral: str, options: dict[str, int]) -> None:
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE="2")  # which transformers reads
    with pytest.raises(fs.UnsupportedModelError, match=r"along layers \(tp\)"):
        fs.evaluate(load_native(mixtral, options), ragged_batches(2))
