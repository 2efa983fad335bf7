"""Models that others look at are left as they were; blocks are found; wrappers are followed or refused."""

import copy
import itertools
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdp_sft as fs
from fsdp_sft._model.blocks import UnsupportedModelError
from fsdp_sft._model.forward import probed
from fsdp_sft._model.view import named_tensors, reshard
from tests.harness.losses import with_loss
from tests.harness.models import full, largest_error, oracle_gradients, ragged_batches, tiny_model
from tests.harness.ranks import device_here, mesh_here, on_ranks

ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 8,
    },
}


def _verify(model: Any) -> None:
    with suppress(fs.PackingError):  # rows of a pack set each other's frequencies
        fs.verify_packing(model, max_length=64)


LOOKS: dict[str, Callable[[Any], Any]] = {
    "prepare_loss": lambda model: fs.prepare_loss(model),
    "verify_packing": _verify,
}


def _state(model: nn.Module) -> dict[str, Any]:
    """All tensors and plain attributes, by name."""
    found: dict[str, Any] = dict(named_tensors(model))
    found |= {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    found["config"] = str(getattr(model, "config", None))
    for fqn, module in model.named_modules():
        found |= {f"{fqn}:{name}": value for name, value in vars(module).items()}
    plain = (torch.Tensor, bool, int, float, str, type(None))
    return {
        name: str((value.dtype, full(value).detach().tolist())) if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
        if isinstance(value, plain)
    }


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted({name for name, _ in before.items() ^ after.items()})


@pytest.mark.parametrize(
    ("look", "rope", "ranks"),
    [*itertools.product(LOOKS, ROPES, [1]), *((look, "dynamic", 2) for look in LOOKS)],
)
@on_ranks()
def test_a_look_leaves_a_model_as_it_was(look: str, rope: str, ranks: int) -> None:
    model = tiny_model("llama", max_position_embeddings=16, rope_parameters=ROPES[rope])
    if ranks > 1:
        fs.shard_model(model, mesh=mesh_here())
    model.model.layers[1].eval()
    ids = torch.arange(3, 35)[None]
    model(input_ids=ids[:, :9]).logits.sum().backward()
    with torch.no_grad():
        model(input_ids=ids)  # longer than the model was made for: the cached length has grown
        oracle = copy.deepcopy(model) if ranks == 1 else None
    reshard(model)
    before = _state(model)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    LOOKS[look](model)
    drawn = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    assert drawn == (torch.rand(3).tolist(), random.random(), np.random.rand())
    assert _changed(before, _state(model)) == []
    if oracle is not None:
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, oracle(input_ids=ids).logits)


class Restless(nn.Module):
    """Changes everything of itself that a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("gone", torch.zeros(1))
        self.count, self.longest, self.kept = 0, torch.tensor(4), torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.table += 1
        self.kept.mul_(7)
        self.register_buffer("replaced", torch.ones(5))
        self.register_buffer("new_buffer", torch.ones(1))
        del self._buffers["gone"]
        self.longest, self.new_flag, self.new_tensor = torch.tensor(9), True, torch.ones(1)
        return x * self.weight * torch.rand(())


def test_whatever_a_forward_changes_is_put_back_after_an_error_too() -> None:
    model = nn.Sequential(Restless(), nn.Dropout())
    model[1].eval()
    before, identities = _state(model), {n: id(b) for n, b in model.named_buffers()}
    torch.manual_seed(3)
    with pytest.raises(ZeroDivisionError), probed(model):
        model.train()
        model(torch.ones(3))
        assert _changed(before, _state(model)) != []
        raise ZeroDivisionError
    assert _changed(before, _state(model)) == []
    assert {n: id(b) for n, b in model.named_buffers()} == identities
    after = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(torch.rand(()), after)


# --- find_blocks on every causal LM that transformers can build, and on models of other origin -------------

# Where the trunk is more, or something else, than config.num_hidden_layers says.
COUNTS = {
    "blenderbot": 24,  # its config counts the encoder
    "hrm_text": 32,  # two stacks of 16, each run several times
    "longcat_flash": 28,  # each layer holds two attentions
    "xlm": 24,  # 12 attentions and 12 feed-forwards in lists of their own
}
SEVERAL_TRUNKS = {"blt", "gemma3", "git", "got_ocr2", "moss_transcribe_diarize", "phi4_multimodal"}


@pytest.mark.slow
def test_every_causal_lm_of_transformers_has_its_layers_found() -> None:
    import transformers

    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    transformers.logging.set_verbosity_error()
    checked, not_built, wrong = [], [], []
    for model_type, name in names.items():
        try:
            config = transformers.CONFIG_MAPPING[model_type]()
            with torch.device("meta"):
                model = getattr(transformers, name)(config)
        except Exception:  # default configs that transformers itself cannot build
            not_built.append(model_type)
            continue
        count = len(fs.find_blocks(model))
        expected = COUNTS.get(
            model_type,
            config.get_text_config().num_hidden_layers
            if hasattr(config.get_text_config(), "num_hidden_layers")
            else None,
        )
        more = model_type in SEVERAL_TRUNKS and (expected is None or count > expected)
        (checked if more or count == expected else wrong).append((model_type, count, expected))
    assert not wrong
    assert len(checked) > 100
    assert len(not_built) < 40, not_built


@pytest.mark.parametrize(
    ("family", "by_class", "names"),
    [
        ("llama", None, ["model.layers.{}"]),
        ("gpt2", None, ["transformer.h.{}"]),
        ("mixtral", None, ["model.layers.{}"]),
        ("t5", None, ["encoder.block.{}", "decoder.block.{}"]),
        ("bert", None, ["bert.encoder.layer.{}"]),
        ("llama", "LlamaAttention", ["model.layers.{}.self_attn"]),
        ("llama", ["LlamaDecoderLayer", nn.Linear], ["model.layers.{}", "lm_head"]),
    ],
)
def test_blocks_of_decoders_encoder_decoders_and_classifiers_or_the_outermost_of_a_class(
    family: str, by_class: Any, names: list[str]
) -> None:
    model = tiny_model(family)
    expected = [name.format(i) for name in names for i in (range(3) if "{}" in name else [0])]
    blocks = fs.find_blocks(model, block_cls=by_class)
    assert list(blocks) == expected
    assert all(model.get_submodule(fqn) is block for fqn, block in blocks.items())


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16)


def test_containers_that_are_never_called_are_no_blocks() -> None:
    """nanoGPT, litgpt and nanochat keep their trunk in a ModuleDict; others nest lists."""
    model = nn.Module()
    model.transformer = nn.ModuleDict(
        {
            "wte": nn.Embedding(11, 8),
            "h": nn.ModuleList(_layer() for _ in range(3)),
            "ln_f": nn.LayerNorm(8),
        }
    )
    model.lm_head = nn.Linear(8, 11)
    assert list(fs.find_blocks(model)) == [f"transformer.h.{i}" for i in range(3)]
    model.transformer["head"] = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    assert list(fs.find_blocks(model)) == [f"transformer.h.{i}" for i in range(3)]
    nested: list[tuple[nn.Module, list[str]]] = [
        (
            nn.ModuleList([nn.ModuleList([_layer(), _layer()]), nn.ModuleList([_layer()])]),
            ["0.0", "0.1", "1.0"],
        ),
        (
            nn.ModuleList(nn.ModuleDict({"a": _layer(), "b": nn.Linear(8, 8)}) for _ in "12"),
            ["0.a", "0.b", "1.a", "1.b"],
        ),
        (nn.ModuleList([nn.ModuleList([_layer(), nn.Identity()]), _layer()]), ["0.0", "1"]),
        (nn.ModuleDict({f"layer_{i}": _layer() for i in range(2)}), ["layer_0", "layer_1"]),
        (nn.ModuleDict({"first": _layer(), "second": _layer()}), ["first", "second"]),
    ]
    for trunk, expected in nested:
        model = nn.Module()
        model.trunk = trunk
        assert list(fs.find_blocks(model)) == [f"trunk.{name}" for name in expected]


def test_finding_nothing_lists_what_was_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(UnsupportedModelError, match=r"block_cls=.*Linear x2"):
        fs.find_blocks(model)
    with pytest.raises(
        UnsupportedModelError, match=r"\['LlamaLayer'\] in LlamaForCausalLM.*LlamaDecoderLayer x3"
    ):
        fs.find_blocks(tiny_model("llama"), block_cls="LlamaLayer")


# --- models that others have wrapped: the ranks are inferred, or the wrapper is refused by name ----------


class _FabricModule(nn.Module):
    """As Lightning Fabric's: a module around the strategy's, around the user's."""

    def __init__(self, forward_module: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module(*args, **kwargs)


def _accelerated(model: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", LOCAL_RANK=str(dist.get_rank()))
    return accelerate.Accelerator(cpu=True, mixed_precision="no").prepare_model(model)


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "ddp, unused": lambda m: DistributedDataParallel(m, find_unused_parameters=True),
    "ddp, static": lambda m: DistributedDataParallel(m, static_graph=True),
    "fabric": lambda m: _FabricModule(DistributedDataParallel(m), m),
    "compiled": lambda m: torch.compile(DistributedDataParallel(m), backend="eager"),
    "accelerate": _accelerated,
}


@pytest.mark.parametrize(
    "kinds",
    [
        ["ddp", "ddp, unused", "ddp, static", "fabric"],
        # Dynamo compiles DDP's hooks; accelerate takes seconds to import in each rank.
        pytest.param(["compiled", "accelerate"], marks=pytest.mark.slow),
    ],
    ids=["torch", "others"],
)
@on_ranks(2, timeout=240)
def test_wrapped_models_train_as_their_ranks_together(kinds: list[str], tmp_path: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = ragged_batches(2 * ranks)  # unequal targets, and none in the last
    for kind, wrap in [(kind, WRAPPERS[kind]) for kind in kinds]:
        plain = tiny_model("llama")
        loss, expected = oracle_gradients(plain, batches)
        norm = float(torch.stack([g.double().norm() for g in expected.values()]).norm())
        inner = copy.deepcopy(plain).to(device_here())
        model = wrap(inner)
        assert fs.evaluate(model, batches[rank::ranks]).loss == pytest.approx(loss, rel=1e-6), kind
        for grad_sync in ("each", "last") if kind == "ddp" else ("last",):
            inner.load_state_dict(plain.state_dict())
            before = {name: p.detach().clone() for name, p in inner.named_parameters()}
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            result = fs.train_step(
                model, batches[rank::ranks], optimizer, max_grad_norm=None, grad_sync=grad_sync
            )
            assert (result.loss, result.grad_norm) == (
                pytest.approx(loss, rel=1e-6),
                pytest.approx(norm, rel=1e-5),
            ), kind
            actual = {name: full(before[name] - p.detach()) for name, p in inner.named_parameters()}
            assert largest_error(actual, expected) <= 1e-5, (kind, grad_sync)
        if kind not in ("ddp", "fabric"):
            continue
        fs.save_checkpoint(f"{tmp_path}/{kind}", 1, model=model, optimizer=optimizer)
        other = tiny_model("llama", seed=5)
        fs.load_checkpoint(f"{tmp_path}/{kind}", model=other)
        for name, parameter in other.named_parameters():
            assert torch.equal(parameter, full(inner.get_parameter(name))), (kind, name)
        fs.load_checkpoint(f"{tmp_path}/{kind}", model=wrap(tiny_model("llama", seed=6).to(device_here())))
        assert (fs.export_hf(model, f"{tmp_path}/{kind}-hf") / "config.json").is_file()


@on_ranks(4)
def test_a_process_group_of_some_ranks_is_refused() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(
        tiny_model("llama").to(device_here()), process_group=groups[dist.get_rank() // 2]
    )
    batch = {key: value.to(device_here()) for key, value in ragged_batches(1)[0].items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: dict[str, Callable[[], Any]] = {
        "train_step": lambda: fs.train_step(model, [batch], optimizer),
        "evaluate": lambda: fs.evaluate(model, [batch]),
        "causal_lm_loss": lambda: fs.causal_lm_loss(model, batch, num_targets=3),
        "prepare_loss": lambda: fs.prepare_loss(model),
        "verify_packing": lambda: fs.verify_packing(model, max_length=64),
    }
    for name, call in calls.items():
        with pytest.raises(fs.UnsupportedModelError, match="leaves out some of the 4 ranks"):
            call()
            pytest.fail(name)


def _calls(model: nn.Module) -> list[Any]:
    batch, optimizer = ragged_batches(1)[0], torch.optim.SGD(model.parameters(), lr=0.1)
    return [
        lambda: fs.train_step(model, [batch], optimizer),
        lambda: fs.evaluate(model, [batch]),
        lambda: fs.causal_lm_loss(with_loss(model, impl="logits"), batch, num_targets=3),
        lambda: fs.prepare_loss(model),
        lambda: fs.verify_packing(model, max_length=64),
        lambda: fs.save_checkpoint("nowhere", 1, model=model),
        lambda: fs.load_checkpoint("nowhere", model=model),
        lambda: fs.save_full_state_dict(model, "nowhere.safetensors"),
        lambda: fs.shard_model(model, mesh=mesh_here()),
    ]


@on_ranks(2)
def test_what_cannot_be_followed_is_refused_by_name() -> None:
    class DeepSpeedEngine(_FabricModule):
        pass

    part = tiny_model("llama")
    part.model.layers[0] = DistributedDataParallel(part.model.layers[0])
    inner = tiny_model("llama")
    cases = {
        "FullyShardedDataParallel": torch.distributed.fsdp.FullyShardedDataParallel(
            tiny_model("llama"), device_id=torch.device("cpu")
        ),
        "DataParallel": nn.DataParallel(tiny_model("llama")),
        "DeepSpeedEngine": DeepSpeedEngine(inner, inner),
        "only a part": part,
    }
    for named, model in cases.items():
        for number, call in enumerate(_calls(model)):
            with pytest.raises(fs.UnsupportedModelError, match=named):
                call()
                raise AssertionError(f"call {number} of {named}")
    both = DistributedDataParallel(tiny_model("llama"))
    with pytest.raises(fs.UnsupportedModelError, match="already"):
        fs.shard_model(both, mesh=mesh_here())
