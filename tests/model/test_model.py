"""A model that others look at is left as it was; its blocks are found, whatever its origin."""

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fsdp_sft as fs
from fsdp_sft._model.blocks import UnsupportedModelError
from fsdp_sft._model.forward import probed
from fsdp_sft._model.sharded import reshard
from fsdp_sft._model.view import named_tensors
from tests.harness.device import mesh_here
from tests.harness.models import full, tiny_model
from tests.harness.ranks import run_distributed

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


def _check_look(look: str, rope: str, sharded: bool) -> tuple[list[str], bool]:
    model = tiny_model("llama", max_position_embeddings=16, rope_parameters=ROPES[rope])
    if sharded:
        fs.shard_model(model, mesh=mesh_here())
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        model(input_ids=ids)  # longer than the model was made for: the cached length has grown
        oracle = copy.deepcopy(model) if not sharded else None
    reshard(model)
    before = _state(model)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    LOOKS[look](model)
    drawn = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    unmoved = drawn == (torch.rand(3).tolist(), random.random(), np.random.rand())
    changed = _changed(before, _state(model))
    if oracle is not None:
        with torch.no_grad():
            same = torch.equal(model(input_ids=ids).logits, oracle(input_ids=ids).logits)
        changed += [] if same else ["later logits"]
    return changed, unmoved


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("look", LOOKS)
def test_a_look_leaves_a_model_as_it_was(look: str, rope: str) -> None:
    assert _check_look(look, rope, sharded=False) == ([], True)


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_leaves_a_sharded_model_as_it_was(look: str) -> None:
    assert run_distributed(_check_look, 2, look, "dynamic", True) == [([], True)] * 2


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
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    checked, not_built, wrong = [], [], []
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
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
        if model_type in SEVERAL_TRUNKS:
            ok = expected is None or count > expected
        else:
            ok = count == expected
        (checked if ok else wrong).append((model_type, count, expected))
    assert not wrong
    assert len(checked) > 100
    assert len(not_built) < 40, not_built


@pytest.mark.parametrize(
    ("family", "prefixes"),
    [
        ("llama", {"model.layers": 3}),
        ("gpt2", {"transformer.h": 3}),
        ("mixtral", {"model.layers": 3}),
        ("t5", {"encoder.block": 3, "decoder.block": 3}),
        ("bert", {"bert.encoder.layer": 3}),
    ],
)
def test_blocks_of_decoders_encoder_decoders_and_classifiers(family: str, prefixes: dict[str, int]) -> None:
    model = tiny_model(family)
    expected = [f"{prefix}.{i}" for prefix, n in prefixes.items() for i in range(n)]
    blocks = fs.find_blocks(model)
    assert list(blocks) == expected
    assert all(model.get_submodule(fqn) is block for fqn, block in blocks.items())


def test_by_class_takes_the_outermost() -> None:
    model = tiny_model("llama")
    assert list(fs.find_blocks(model, block_cls="LlamaAttention")) == [
        f"model.layers.{i}.self_attn" for i in range(3)
    ]
    several = fs.find_blocks(model, block_cls=["LlamaDecoderLayer", nn.Linear])
    assert list(several) == [f"model.layers.{i}" for i in range(3)] + ["lm_head"]


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
