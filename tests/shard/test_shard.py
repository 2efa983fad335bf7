"""shard_model: dtypes, groups, ties, parts kept in float32, and the models it must refuse."""

import copy
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

import fsdp_sft as fs
from fsdp_sft.shard import units
from fsdp_sft.shard.units import own_vocabulary
from fsdp_sft.weights import build_meta_model, load_weights
from tests.harness.architectures import class_names, inputs_for, quiet, save_all, tiny_architecture
from tests.harness.forks import Program
from tests.harness.hf_folders import plain
from tests.harness.losses import gradients_of
from tests.harness.models import FLOAT32, full, largest_error, ragged_batches, tiny_model, windows_of_rank
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed


@on_ranks(2)
def test_float32_masters_and_bfloat16_compute() -> None:
    for family in ("llama", "qwen2-tied", "gpt2"):
        plain = tiny_model(family, dtype=torch.bfloat16)
        buffers = {name: b.clone() for name, b in plain.named_buffers()}
        model = fs.shard_model(copy.deepcopy(plain), mesh=mesh_here())
        assert isinstance(model, FSDPModule)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert p.dtype == torch.float32
            assert torch.equal(full(p), q.float()), name
        assert all(
            b.dtype == buffers[n].dtype and torch.equal(full(b), buffers[n]) for n, b in model.named_buffers()
        )
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert (head.weight is embedding.weight) == getattr(model.config, "tie_word_embeddings", False)
        # bfloat16 compute on float32 masters: what the plain bfloat16 model computes, bit for bit.
        batch = ragged_batches(2)[0]
        inputs = {name: batch[name].to(device_here()) for name in ("input_ids", "attention_mask")}
        logits = model(**inputs).logits
        assert logits.dtype == torch.bfloat16
        assert torch.equal(logits, plain.to(device_here())(**inputs).logits)
        fs.loss_sum(model, batch)[0].backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@on_ranks(2)
def test_frozen_parameters_keep_their_dtype_or_take_the_one_asked_for() -> None:
    for frozen_dtype, expected in ((None, torch.bfloat16), (torch.float16, torch.float16)):
        model = tiny_model("llama", dtype=torch.bfloat16)
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        fs.shard_model(model, mesh=mesh_here(), frozen_dtype=frozen_dtype)
        for p in model.parameters():
            assert p.dtype == (torch.float32 if p.requires_grad else expected)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        assert not fs.train_step(model, ragged_batches(2)[:1], optimizer).skipped


def _own_loss_gradients(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    model(**batch).loss.backward()
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@on_ranks(2)
def test_encoder_decoders_and_classifiers_train_with_their_own_loss() -> None:
    tokens = ragged_batches(2)[0]
    for family, batch, message in (
        ("t5", tokens, "T5ForConditionalGeneration is an encoder-decoder"),
        ("bert", {**tokens, "labels": torch.tensor([0, 2])}, r"cannot be compared.*loss_fn"),
    ):
        plain = tiny_model(family, dtype=torch.float64)
        expected = _own_loss_gradients(copy.deepcopy(plain), batch)
        for ratio in (0, "1/3"):
            model = copy.deepcopy(plain)
            fs.apply_sac(model, ratio)
            fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32, master_dtype=torch.float64)
            # The same batch on every rank: the average over ranks is the single process's gradient.
            assert largest_error(_own_loss_gradients(model, batch), expected) < 1e-10
        with pytest.raises(ValueError, match=message):
            fs.causal_lm_loss(model, tokens, num_targets=1)


class SharedLayer(nn.Module):
    """Shares one linear by its parameters, as Zamba's layers share attention, and one as a module."""

    def __init__(self, shared: nn.Linear, same: nn.Linear) -> None:
        super().__init__()
        self.own, self.shared, self.same = nn.Linear(8, 8), nn.Linear(8, 8), same
        self.shared.weight, self.shared.bias = shared.weight, shared.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.own(x)) + torch.tanh(self.shared(x)) * torch.sigmoid(self.same(x))


class SharedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared, same = nn.Linear(8, 8), nn.Linear(8, 8)
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(SharedLayer(shared, same) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(2, timeout=60)
def test_layers_shared_across_blocks_become_a_group_of_their_own() -> None:
    torch.manual_seed(0)
    plain, ids = SharedModel().double(), torch.arange(6).view(2, 3)
    reference = copy.deepcopy(plain)
    reference(ids).square().sum().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    model = fs.shard_model(plain, mesh=mesh_here(), mp_policy=FLOAT32, master_dtype=torch.float64)
    for _ in range(2):
        model.zero_grad()
        model(ids).square().sum().backward()
        assert largest_error({name: full(p.grad) for name, p in model.named_parameters()}, expected) < 1e-10
    assert model.layers[0].shared.weight is model.layers[2].shared.weight


@on_ranks(2)
def test_modules_kept_in_float32_are_honoured_or_named() -> None:
    batch = {name: tensor.to(device_here()) for name, tensor in ragged_batches(2)[0].items()}
    for dtype, attribute in (
        (torch.bfloat16, "_keep_in_fp32_modules_strict"),
        (torch.float16, "_keep_in_fp32_modules"),
    ):
        plain = tiny_model("t5")
        setattr(plain, attribute, {"wo"})
        model = copy.deepcopy(plain)
        for name, parameter in plain.named_parameters():
            if not name.endswith("wo.weight"):
                parameter.data = parameter.data.to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fs.shard_model(model, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
        seen = []
        wo = model.encoder.block[0].layer[-1].DenseReluDense.wo
        wo.register_forward_pre_hook(lambda m, args, seen=seen: seen.append((m.weight.dtype, args[0].dtype)))
        output = model(**batch)
        assert seen == [(torch.float32, torch.float32)]
        assert torch.equal(output.logits, plain.to(device_here())(**batch).logits), (
            "what plain transformers computes"
        )
        output.loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())

    # What is not honoured is named, once, on rank 0.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fs.shard_model(tiny_model("t5"), mesh=mesh_here())
    named = [str(w.message) for w in caught if "_keep_in_fp32_modules" in str(w.message)]
    assert len(named) == (dist.get_rank() == 0)
    assert all("encoder.block.*.layer.*.DenseReluDense.wo.weight" in text for text in named)


@on_ranks(4)
def test_what_cannot_be_sharded_is_refused() -> None:
    mesh, llama, broken = mesh_here(), tiny_model("llama"), tiny_model("llama")
    others = fs.find_blocks(tiny_model("llama"))
    sharded = fs.shard_model(tiny_model("llama"), mesh=mesh)
    for call, message in (
        (lambda: fs.shard_model(sharded, mesh=mesh), "is sharded already"),
        (lambda: fs.shard_model(broken, mesh=mesh, reshard_after_forward=3), "factor of 4, not 3"),
        (lambda: fs.shard_model(nn.Linear(3, 3), mesh=mesh), "no block"),
        (
            lambda: fs.shard_model(llama, mesh=mesh, blocks=others),
            "model.layers.0, .* are not modules of this",
        ),
        (lambda: fs.describe_sharding(llama), "is not sharded; call shard_model first"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@on_ranks(4)
def test_description_lists_groups_with_local_bytes() -> None:
    model = tiny_model("qwen2-tied", dtype=torch.bfloat16)
    model.model.norm.requires_grad_(False)
    fs.shard_model(model, mesh=mesh_here(dp_replicate=2), offload_policy=CPUOffloadPolicy())
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]))  # leaves the root gathered
    plain = tiny_model("qwen2-tied")
    layer = sum(p.numel() for p in plain.model.layers[0].parameters())
    root = sum(p.numel() for p in plain.parameters()) - 3 * layer
    lines = fs.describe_sharding(model).splitlines()
    blocks = next(line for line in lines if line.startswith("model.layers.0 ... model.layers.2"))
    assert blocks.split()[3:6] == ["3", f"{layer:,}", f"{layer:,}"]
    assert "(Replicate(), Shard(dim=0))" in blocks
    root_line = next(line for line in lines if line.startswith("(root)"))
    assert root_line.split()[1:4] == ["1", f"{root:,}", f"{root - 32:,}"]
    assert "bfloat16, float32" in root_line
    assert "mesh (dp_replicate=2, dp_shard=2)" in lines[-1]


@on_ranks(2)
def test_groups_within_groups_train_the_same() -> None:
    plain, batch = tiny_model("llama", dtype=torch.float64), ragged_batches(2)[0]
    expected = _own_loss_gradients(copy.deepcopy(plain), batch)
    blocks = fs.find_blocks(plain, block_cls="Linear") | fs.find_blocks(plain)
    assert len(blocks) > 3
    model = fs.shard_model(
        plain, mesh=mesh_here(), mp_policy=FLOAT32, master_dtype=torch.float64, blocks=blocks
    )
    assert largest_error(_own_loss_gradients(model, batch), expected) < 1e-10


def test_a_72b_model_shards_over_64_fake_ranks_in_one_process(tmp_path: Path) -> None:
    script = tmp_path / "shard.py"
    script.write_text("""
import time, torch, torch.distributed as dist, transformers as tf
from torch.testing._internal.distributed.fake_pg import FakeStore
import fsdp_sft as fs

dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
config = tf.Qwen2Config(hidden_size=8192, intermediate_size=29568, num_hidden_layers=80,
    num_attention_heads=64, num_key_value_heads=8, vocab_size=152064)
with torch.device("meta"):
    model = tf.Qwen2ForCausalLM(config).to(torch.bfloat16)
start = time.perf_counter()
fs.shard_model(model, mesh=fs.build_mesh(dp_replicate=2, device_type="cpu"), reshard_after_forward=8)
seconds = time.perf_counter() - start
assert seconds < 20, seconds
local = sum(p.to_local().numel() for p in model.parameters())
assert local == sum(p.numel() for p in model.parameters()) // 32, local
print(fs.describe_sharding(model))
""")
    code, text = Program(script).wait(120)
    assert code == 0, text[-2000:]
    assert "72,706,203,648 parameters" in text


# --- methods of transformers and peft that would write, send or change one rank's shards -------------------

FOREIGN: dict[str, Any] = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "with its shards": lambda model, folder: model.save_pretrained(folder, state_dict=model.state_dict()),
}


@pytest.mark.parametrize("lora", [False, True])
@on_ranks(2)
def test_they_are_refused_before_anything_is_written(lora: bool, tmp_path: Path) -> None:
    model: Any = tiny_model("llama")
    if lora:
        model = fs.add_adapters(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    fs.shard_model(model, mesh=mesh_here())
    for one in (model, model.get_base_model() if lora else model):
        for name, call in FOREIGN.items():
            with pytest.raises(fs.UnsupportedModelError, match="export_hf"):
                call(one, tmp_path / "out")
            assert not (tmp_path / "out").exists(), name
        with pytest.raises(fs.UnsupportedModelError, match="new_vocab_size"):
            one.resize_token_embeddings(200)
        assert one.resize_token_embeddings() is one.get_input_embeddings()
    (fs.export_adapter if lora else fs.export_hf)(model, tmp_path / "exported")
    assert (tmp_path / "exported" / ("adapter_config.json" if lora else "config.json")).exists()


# --- compiled blocks have room for their variants ----------------------------------------------------------


@pytest.fixture
def compiler_anew() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield
    torch.compiler.reset()


def _compiled_variants(lengths: int) -> int:
    """Graphs compiled in training with ragged rows and evaluations in between."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model = tiny_model("llama")
    fs.apply_sac(model, "1/3")
    fs.compile_blocks(model, backend=backend, dynamic=False)
    for length in range(2, 2 + lengths):
        ids = torch.arange(3, 3 + length)[None]
        model.train()(input_ids=ids).logits.sum().backward()
        with torch.no_grad():
            model.eval()(input_ids=ids)
    return len(graphs)


@pytest.mark.usefixtures("compiler_anew")
def test_ragged_rows_and_evaluations_are_compiled_to_the_last() -> None:
    one = _compiled_variants(1)
    torch.compiler.reset()
    assert _compiled_variants(3) == 3 * one


# --- a step under the default policy beside plain bf16 transformers, which keeps parts in float32 ----------

# One of each way: a module that owns one such parameter (Flint) or beside others (Inkling's
# router), a convolution used by its weight (BailingHybrid, Inkling), buffers computed in bf16 (MiniMax), made
# in float32 without being listed (HunYuanMoE), float32 between blocks (Olmo).
ALWAYS = [
    "BailingHybridForCausalLM",
    "FlintForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "InklingForCausalLM",
    "MiniMaxForCausalLM",
    "OlmoForCausalLM",
]
# Plain transformers cannot train these in bf16, and why.
NOT_RUNNABLE = {
    "Gemma4AssistantForCausalLM": "cannot be built",
    "Gemma4UnifiedAssistantForCausalLM": "is handed float32 hidden states by the model that it assists",
    "DbrxForCausalLM": "transformers 5.17 refuses the config that it wrote",
}


def _step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    output = model(**inputs_for(model))
    loss = output.loss if getattr(output, "loss", None) is not None else output.logits.float().square().mean()
    loss.backward()
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach().float().cpu(), {name: gradient.float() for name, gradient in gradients.items()}


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in other))


def _check_one(folder: Path, mesh: Any, sac: bool) -> tuple[str, str]:
    """How a step compares: (why plain transformers cannot, what differs)."""
    try:
        expected = _step(plain(folder, dtype=torch.bfloat16))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}", ""
    model = build_meta_model(folder)
    if sac:
        fs.apply_sac(model, 1)
    fs.shard_model(model, mesh=mesh)
    load_weights(model, folder)
    with torch.no_grad():  # after which all that was gathered by itself is free again
        model(**inputs_for(model))
    found = _step(model)
    if not torch.equal(found[0], expected[0]) or found[1].keys() != expected[1].keys():
        return "", f"loss {found[0].item()} instead of {expected[0].item()}"
    if all(torch.equal(found[1][name], expected[1][name]) for name in expected[1]):
        return "", ""
    # FSDP2's hooks change the order in which autograd adds the gradients of a tensor with several users.
    exact = _step(plain(folder))[1]
    errors = _distance(found[1], exact), _distance(expected[1], exact)
    return "", "" if errors[0] <= 3 * errors[1] else f"errors of the gradients: {errors}"


@quiet()
def _check_all(folder: Path, names: list[str], sac: bool) -> dict[str, tuple[str, str]]:
    mesh = mesh_here()
    outcomes = {}
    for name in names:
        try:
            outcomes[name] = _check_one(folder / name, mesh, sac)
        except Exception as error:
            outcomes[name] = "", f"{type(error).__name__}: {str(error)[:300]}"
    return outcomes


SELECTION = [name for name in ALWAYS if hasattr(transformers, name)]  # transformers 5.17 lacks two
EVERY = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.mark.parametrize(
    ("names", "ranks", "sac"),
    [(SELECTION, 1, False), (SELECTION, 2, True), pytest.param(class_names(), 2, False, marks=EVERY)],
    ids=["a selection", "recomputed", "every causal LM"],
)
@quiet()
def test_they_train_as_plain_transformers_does(
    names: list[str], ranks: int, sac: bool, tmp_path: Path
) -> None:
    failed = save_all(tmp_path, names)
    names = [name for name in names if name not in failed]
    assert len(names) >= 4
    by_rank = run_distributed(_check_all, ranks, tmp_path, names, sac, timeout=2400)
    failed |= {name: why for name, (why, _) in by_rank[0].items() if why}
    assert failed.keys() <= NOT_RUNNABLE.keys(), failed
    wrong = {name: problems for name in names if any(problems := [one[name][1] for one in by_rank])}
    assert wrong == {}


@on_ranks(2)
def test_a_head_that_is_asked_for_its_dtype_before_it_is_gathered() -> None:
    ids = torch.arange(3, 19).view(2, 8)
    for name in ("MambaForCausalLM", "Mamba2ForCausalLM"):
        model = tiny_architecture(name)
        expected = copy.deepcopy(model).to(torch.bfloat16)(input_ids=ids, use_cache=False).logits
        fs.shard_model(model, mesh=mesh_here())
        torch.testing.assert_close(
            model(input_ids=ids, use_cache=False).logits.cpu(), expected, rtol=0.0, atol=0.1
        )


# --- untied embedding and head in groups of their own: the numbers of the root's group, gathered less often


def _sharded(family: str, *, own: bool = True, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if not own:
            patch.setattr(units, "own_vocabulary", lambda *_: (None, None))
        model = tiny_model(family)
        fs.apply_sac(model, "1/3")
        return fs.shard_model(model, mesh=mesh_here(), **options)


def _trained(model: Any, grad_sync: Any) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers: list[Any] = []
    windows = windows_of_rank(2, device_here())
    for window in windows:
        result = fs.train_step(model, window, optimizer, grad_sync=grad_sync)
        numbers += [result.loss, result.grad_norm]
    numbers.append(fs.evaluate(model, windows[0]).loss)
    ids = torch.tensor([[3, 4, 5]], device=device_here())
    numbers.append(model.eval().generate(ids, max_new_tokens=4, do_sample=False).tolist())
    return numbers


@on_ranks(2)
def test_numbers_are_those_of_the_roots_group() -> None:
    for family, grad_sync, options in (
        ("llama", "each", {}),
        ("llama", "last", {}),
        ("mixtral", "each", {"reshard_after_forward": False}),
    ):
        models = [_sharded(family, own=own, **options) for own in (True, False)]
        groups = [sum(isinstance(m, FSDPModule) for m in model.modules()) for model in models]
        assert groups[0] == groups[1] + 2
        assert fs.prepare_loss(models[0]) == fs.prepare_loss(models[1])
        first, second = (_trained(model, grad_sync) for model in models)
        assert first == second, (family, options)
    for family in ("qwen2-tied", "gemma3"):
        named = _sharded(family).named_modules()
        assert not any(isinstance(m, FSDPModule) for n, m in named if "embed" in n or "head" in n)


def _gathers(function: Any) -> int:
    """All-gathers that FSDP2 makes in a call."""
    gather = _fsdp_param_group.foreach_all_gather
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", wraps=gather) as counted:
        function()
    return counted.call_count


@on_ranks(2)
def test_they_are_gathered_less_often() -> None:
    model = _sharded("llama")
    blocks = len(fs.find_blocks(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = windows_of_rank(1, device_here())[0][:1]
    fs.train_step(model, window, optimizer)  # what is checked at first has been
    # Forward: the root, the embedding, the blocks and the head. Backward: the blocks.
    assert _gathers(lambda: fs.train_step(model, window, optimizer)) == 3 + 2 * blocks
    ids = torch.tensor([[3, 4, 5]], device=device_here())
    model.eval()

    def generate(tokens: int) -> int:
        options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
        return _gathers(lambda: model.generate(ids, **options))

    assert generate(2) == 3 + 2 * blocks
    assert generate(4) == 4 * blocks, "embedding and head stay gathered"


@on_ranks(2)
def test_reshard_frees_them() -> None:
    """As in the root's group: a forward without a backward leaves them gathered, and reshard() frees them."""
    model, batch = _sharded("llama"), windows_of_rank(1, device_here())[0][0]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            model(**batch)
        assert not isinstance(model.lm_head.weight, DTensor)
        model.reshard()
        assert all(isinstance(p, DTensor) for p in model.parameters())


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _head_again(model: Any, ids: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=ids, output_hidden_states=True)
    return _loss(output.logits, ids) + _loss(model.lm_head(output.hidden_states[-1] / 2), ids)


def _embedded_after(model: Any, ids: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=ids, output_hidden_states=True)
    apart = model.get_input_embeddings()(ids) - output.hidden_states[-1]
    return _loss(output.logits, ids) + apart.square().mean()


@on_ranks(2)
def test_loops_that_call_parts_of_the_model() -> None:
    rank = dist.get_rank()
    for loop in (_head_again, _embedded_after):
        model, plain = tiny_model("llama"), tiny_model("llama").to(device_here())
        fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32)
        for step in range(2):
            ids = torch.randint(3, 90, (4, 9), generator=torch.Generator().manual_seed(step)).to(
                device_here()
            )
            with torch.no_grad():
                model(input_ids=ids[:1])
            model.reshard()
            loop(model, ids[2 * rank : 2 * rank + 2]).backward()
            for half in ids.split(2):
                (loop(plain, half) / 2).backward()
            assert largest_error(gradients_of(model), gradients_of(plain)) < 1e-5, (loop.__name__, step)


def test_what_may_be_used_without_a_call_stays_with_the_root() -> None:
    other: Any = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))  # of another library
    other.get_input_embeddings = lambda: other[0]
    other.get_output_embeddings = lambda: other[1]
    model = tiny_model("llama")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for arguments, expected in (
        ((other, []), (None, None)),
        ((tiny_model("qwen2-tied"), []), (None, None)),
        ((model, []), (embedding, head)),
        ((model, [embedding]), (None, head)),
        ((model, [], {id(head.weight)}), (embedding, None)),
    ):
        assert own_vocabulary(*arguments) == expected
    model.again = embedding
    assert own_vocabulary(model, []) == (None, head)
