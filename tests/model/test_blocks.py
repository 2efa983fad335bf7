"""find_blocks on every causal LM that transformers can build, and on models of other origin."""

import pytest
import torch
from torch import nn

import fsdp_sft as fs
from fsdp_sft._model.blocks import UnsupportedModelError
from tests.harness.models import tiny_model

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
    attentions = fs.find_blocks(model, block_cls="LlamaAttention")
    assert list(attentions) == [f"model.layers.{i}.self_attn" for i in range(3)]
    several = fs.find_blocks(model, block_cls=["LlamaDecoderLayer", nn.Linear])
    assert list(several) == [f"model.layers.{i}" for i in range(3)] + ["lm_head"]


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16)


def test_containers_that_are_never_called_are_no_blocks() -> None:
    """nanoGPT, litgpt and nanochat keep their trunk in a ModuleDict; others nest lists."""
    parts = {
        "wte": nn.Embedding(11, 8),
        "h": nn.ModuleList(_layer() for _ in range(3)),
        "ln_f": nn.LayerNorm(8),
    }
    model = nn.Module()
    model.transformer = nn.ModuleDict(parts)
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
