"""distillation_loss beside the plain formula: every kind, head, layout and mesh; no logits of either."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_sft as fs
from tests.harness.device import device_here, mesh_here
from tests.harness.float64 import AllFloat64
from tests.harness.long_rows import PACKED, PADDED, batch_of, rows_of
from tests.harness.losses import FAMILIES, adapted_model, family_model, shard_by_heads
from tests.harness.models import VOCAB, largest_error, ragged_batches, tiny_model
from tests.harness.ranks import run_distributed
from tests.harness.token_values import gradients_of, plain_divergence

BATCHES = {kind: batch_of(rows_of([6, 15, 1, 9], seed=2), kind) for kind in (PACKED, PADDED)}
KINDS = ["forward", "reverse"]


def _teacher(dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    """Of another size and family than any student."""
    return tiny_model("qwen3", seed=5, dtype=dtype, hidden_size=16, num_hidden_layers=2, **overrides).eval()


Result = tuple[float, dict[str, torch.Tensor]]


def _of_plain(student: Any, teacher: Any, batch: Any, **options: Any) -> Result:
    twin = copy.deepcopy(student)
    loss = plain_divergence(twin, teacher, batch, **options)
    loss.backward()
    return float(loss.detach()), gradients_of(twin)


def _of_ours(student: Any, teacher: Any, batch: Any, **options: Any) -> Result:
    loss = fs.distillation_loss(student, teacher, batch, **options)
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters())
    return float(loss.detach()), gradients_of(student)


def _compare(own: Any, expected: Any, close: float) -> None:
    assert own[0] == pytest.approx(expected[0], rel=close)
    assert largest_error(own[1], expected[1]) <= close


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_formula(family: str, kind: Any) -> None:
    student, teacher = family_model(family, torch.float64), _teacher()
    with AllFloat64():
        for batch in BATCHES.values():
            for temperature in (1.0, 2.5):
                options = {"temperature": temperature, "kind": kind}
                expected = _of_plain(student, teacher, batch, **options)
                _compare(_of_ours(student, teacher, batch, **options), expected, 1e-12)
        # With the families' caps and scales on the teacher's side.
        expected = _of_plain(copy.deepcopy(student), student, BATCHES[PADDED], temperature=1.0, kind=kind)
        assert abs(expected[0]) < 1e-12
        other = tiny_model("llama", dtype=torch.float64)
        expected = _of_plain(other, student, BATCHES[PADDED], temperature=1.0, kind=kind)
        _compare(_of_ours(other, student, BATCHES[PADDED], kind=kind), expected, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_weights_adapters_and_fallbacks(kind: Any) -> None:
    batch = BATCHES[PADDED]
    student, teacher = tiny_model("llama"), _teacher(torch.float32)
    expected = _of_plain(student, teacher, batch, temperature=1.0, kind=kind)
    weights = {**batch, "loss_weights": torch.full(batch["labels"].shape, 0.25)}
    for full_logits in (False, True):
        if full_logits:
            student.lm_head.register_forward_hook(lambda module, args, output: output.clone())
            fs.prepare_loss(student)
        _compare(_of_ours(student, teacher, batch, kind=kind), expected, 2e-6)
        own = _of_ours(student, teacher, weights, kind=kind)
        _compare((4 * own[0], {name: 4 * g for name, g in own[1].items()}), expected, 2e-6)
    pytest.importorskip("peft")
    adapted = adapted_model("lora", torch.float64)
    expected = _of_plain(adapted, _teacher(), batch, temperature=2.0, kind=kind)
    _compare(_of_ours(adapted, _teacher(), batch, temperature=2.0, kind=kind), expected, 1e-12)


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            _Largest.numel = max(_Largest.numel, out.numel())
        return out


def test_no_logits_are_held() -> None:
    rows = torch.randint(3, VOCAB, (10, 100), generator=torch.Generator().manual_seed(0))
    student, teacher = tiny_model("llama"), _teacher(torch.float32)
    for kind in KINDS:
        fs.distillation_loss(student, teacher, {"input_ids": rows, "labels": rows})
        _Largest.numel = 0
        with _Largest():
            fs.distillation_loss(student, teacher, {"input_ids": rows, "labels": rows}, kind=kind).backward()
        assert _Largest.numel < rows.numel() * VOCAB, "as large as the logits"


@pytest.mark.parametrize("hooked", [False, True])
def test_padded_vocabularies(hooked: bool) -> None:
    batch = ragged_batches(1)[0]
    student, teacher = tiny_model("llama", dtype=torch.float64), _teacher(vocab_size=VOCAB + 7)
    if hooked:
        teacher.lm_head.register_forward_hook(lambda module, args, output: output.clone())
    with pytest.raises(ValueError, match=r"has 101 rows and the teacher's 108.*vocab_size=101"):
        fs.distillation_loss(student, teacher, batch)
    with pytest.raises(ValueError, match="exceeds the rows of a head"):
        fs.distillation_loss(student, teacher, batch, vocab_size=VOCAB + 1)
    for ids in (VOCAB, VOCAB - 3):
        expected = _of_plain(student, teacher, batch, temperature=1.0, kind="forward", ids=ids)
        _compare(_of_ours(student, teacher, batch, vocab_size=ids), expected, 1e-7)


def test_what_cannot_be_is_refused() -> None:
    batch, student, teacher = ragged_batches(1)[0], tiny_model("llama"), _teacher(torch.float32)
    for options, message in (
        ({"kind": "both"}, "kind must be"),
        ({"temperature": 0}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"vocab_size": 0}, "vocab_size must be"),
    ):
        with pytest.raises(ValueError, match=message):
            fs.distillation_loss(student, teacher, batch, **options)
    with pytest.raises(ValueError, match="the same model"):
        fs.distillation_loss(student, student, batch)
    with pytest.raises(fs.BatchError, match="needs 'labels'"):
        fs.distillation_loss(student, teacher, {"input_ids": batch["input_ids"]})
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    loss = fs.distillation_loss(student, teacher, empty)
    loss.backward()
    assert float(loss.detach()) == 0
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()
    with torch.no_grad():
        assert not fs.distillation_loss(student, teacher, batch).requires_grad


def _check_sharded() -> None:
    rank = dist.get_rank()
    kinds = list(BATCHES)
    batch = {name: value.to(device_here()) for name, value in BATCHES[kinds[rank]].items()}
    plain_teacher = _teacher()
    for family in ("qwen3-tied", "gemma2"):
        plain = family_model(family, torch.float64)
        for kind in KINDS:
            with AllFloat64():
                options = {"temperature": 2.0, "kind": kind}
                oracles = [_of_plain(plain, plain_teacher, own, **options) for own in BATCHES.values()]
                mean = {name: (oracles[0][1][name] + oracles[1][1][name]) / 2 for name in oracles[0][1]}
                student = shard_by_heads(copy.deepcopy(plain).to(device_here()), own_group=kind == "forward")
                teacher = copy.deepcopy(plain_teacher).to(device_here())
                # On a mesh of its own, packed with bare groups, or compiled.
                shape = {"dp_replicate": 2, "dp_shard": 1} if kind == "forward" else {}
                if kind == "reverse":
                    fs.compile_blocks(teacher, backend="aot_eager")
                    fs.compile_blocks(student, backend="aot_eager")
                fs.shard_model(
                    teacher,
                    mesh=mesh_here(**shape),
                    mp_policy=MixedPrecisionPolicy(),
                    master_dtype=torch.float64,
                )
                for _ in range(2):
                    own = _of_ours(student, teacher, batch, **options)
                    _compare(own, (oracles[rank][0], mean), 1e-12)


def test_both_may_be_sharded_on_meshes_of_their_own() -> None:
    run_distributed(_check_sharded, 2)


def _check_shared_rows() -> None:
    fs.init_distributed(device_type=device_here().type)
    mesh, apart = mesh_here(cp=2), mesh_here()
    plain, plain_teacher = tiny_model("qwen3", dtype=torch.float64), _teacher()
    policy = {"mp_policy": MixedPrecisionPolicy(), "master_dtype": torch.float64}
    student = fs.shard_model(copy.deepcopy(plain).to(device_here()), mesh=mesh, **policy)
    fs.use_context_parallel(student, mesh=mesh)
    beside = fs.shard_model(copy.deepcopy(plain_teacher).to(device_here()), mesh=mesh, **policy)
    fs.use_context_parallel(beside, mesh=mesh)
    alone = fs.shard_model(copy.deepcopy(plain_teacher).to(device_here()), mesh=apart, **policy)
    with AllFloat64():
        for batch in BATCHES.values():
            here = {name: value.to(device_here()) for name, value in batch.items()}
            expected = _of_plain(plain, plain_teacher, batch, temperature=1.0, kind="reverse")
            for teacher in (beside, alone):
                # Each of the two ranks has computed the loss: it counts twice, and FSDP2 averages.
                _compare(_of_ours(student, teacher, here, kind="reverse"), expected, 1e-12)
    other = fs.shard_model(copy.deepcopy(plain).to(device_here()), mesh=apart, **policy)
    with pytest.raises(ValueError, match="cp=2 and the student's with cp=1"):
        fs.distillation_loss(other, beside, here)


def test_ranks_may_share_the_rows_of_either() -> None:
    run_distributed(_check_shared_rows, 2)
