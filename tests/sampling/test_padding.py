"""Rows padded on the left: the loss of the same rows padded on the right, or an error in the first step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version

import fsdp_sft as fs
from fsdp_sft._tensors.rounding import TOLERANCES
from fsdp_sft.sampling.verify import left_padding_error
from tests.harness.architectures import class_names, quiet, tiny_architecture
from tests.harness.device import mesh_here
from tests.harness.ranks import on_ranks

ROWS = [list(range(20, 20 + length)) for length in (9, 4, 7, 6)]
REFUSED = pytest.raises(fs.UnsupportedModelError, match="reads a row behind padding differently")
# Every class of transformers 5.23 and 5.24 whose logits of a row move with padding on its left.
MOVED = [
    "Bart",
    "BigBird",
    "BigBirdPegasus",
    "BioGpt",
    "Blenderbot",
    "BlenderbotSmall",
    "Blt",
    "Clvp",
    "DeepseekV4",
    *(["Dory"] if Version(transformers.__version__) >= Version("5.24") else []),
    "Electra",
    "Ernie",
    "GPTBigCode",
    "GPTNeo",
    "Git",
    "HunYuanDenseV1",
    "HunYuanMoEV1",
    "MBart",
    "Marian",
    "MegatronBert",
    "Mvp",
    "PLBart",
    "Pegasus",
    "ProphetNet",
    "RecurrentGemma",
    "RemBert",
    "RoCBert",
    "RoFormer",
    "Rwkv",
    "TrOCR",
    "Whisper",
    "XGLM",
    "xLSTM",
]
# These take more than ids and a mask, or cannot be made without another model.
NOT_RUN = {
    "CsmDepthDecoder",
    "Gemma4Assistant",
    "Gemma4UnifiedAssistant",
    "Musicgen",
    "MusicgenMelody",
}


def _batches(side: str, rows: list[list[int]] = ROWS) -> list[dict[str, Any]]:
    width = max(map(len, rows))
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        padding = width - len(row)
        for name, values, filler in (
            ("input_ids", row, 0),
            ("attention_mask", [1] * len(row), 0),
            ("labels", [-100, *row[1:]], -100),
        ):
            sides = [values, [filler] * padding]
            batch[name].append(sum(sides if side == "right" else sides[::-1], []))
    return [{name: torch.tensor(values) for name, values in batch.items()}]


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize(
    "name", ["Qwen3ForCausalLM", "OPTForCausalLM", "BloomForCausalLM", "MambaForCausalLM"]
)
def test_these_read_rows_the_same_on_either_side(name: str) -> None:
    model = tiny_architecture(name)
    right, left = (fs.train_step(model, _batches(side), _sgd(model)).loss for side in ("right", "left"))
    assert left == pytest.approx(right, rel=1e-5)
    assert fs.evaluate(model, _batches("left")).loss == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("name", ["GPTNeoForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM"])
def test_these_are_refused_padded_on_the_left_and_only_there(name: str) -> None:
    model = tiny_architecture(name)
    fs.train_step(model, _batches("right"), _sgd(model))
    with REFUSED:
        fs.train_step(model, _batches("left"), _sgd(model))
    with REFUSED:
        fs.evaluate(model, _batches("left"))
    assert not fs.train_step(model, _batches("left"), _sgd(model), check=False).skipped
    assert fs.evaluate(model, _batches("right")).num_targets


def test_positions_of_each_row_alone_make_it_right() -> None:
    model = tiny_architecture("GPTNeoForCausalLM")
    (batch,) = _batches("left")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    right = fs.train_step(model, _batches("right"), _sgd(model)).loss
    assert fs.train_step(model, [{**batch, "position_ids": positions}], _sgd(model)).loss == pytest.approx(
        right, rel=1e-5
    )
    with REFUSED:
        fs.train_step(model, [batch], _sgd(model))


@on_ranks(2)
def test_all_ranks_refuse_what_one_has() -> None:
    model = fs.shard_model(tiny_architecture("GPTNeoForCausalLM"), mesh=mesh_here())
    alone = _batches("left", ROWS[:1])  # one row a rank: nobody has padding
    assert not fs.train_step(model, alone, _sgd(model)).skipped
    mine = _batches("left", ROWS[:2]) if dist.get_rank() else alone
    with REFUSED:
        fs.train_step(model, mine, _sgd(model))
    with REFUSED:
        fs.evaluate(model, mine)
    assert not fs.train_step(model, alone, _sgd(model)).skipped, "nothing was lost"


@pytest.mark.slow
def test_every_class() -> None:
    moved = set()
    with quiet():
        for name in class_names():
            kind = name.removesuffix("ForCausalLM")
            if (
                kind not in NOT_RUN
                and left_padding_error(tiny_architecture(name)) > TOLERANCES[torch.float32]
            ):
                moved.add(kind)
    assert moved == set(MOVED)


class OfOnesOwn(torch.nn.Module):
    """Without a config: sums the embeddings so far, those of padding too if it does not heed its mask."""

    def __init__(self, heeds_mask: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.heeds_mask = torch.nn.Embedding(40, 8), heeds_mask
        self.lm_head = torch.nn.Linear(8, 40, bias=False)

    def forward(self, input_ids: Any, attention_mask: Any = None, **_: Any) -> Any:
        seen = attention_mask[..., None] if self.heeds_mask and attention_mask is not None else 1
        logits = self.lm_head((self.embedding(input_ids) * seen).cumsum(1))
        return SimpleNamespace(logits=logits)


def test_a_model_without_a_config_is_looked_at_too() -> None:
    model = OfOnesOwn(True)
    right = fs.train_step(model, _batches("right"), _sgd(model)).loss
    assert fs.train_step(model, _batches("left"), _sgd(model)).loss == pytest.approx(right, rel=1e-5)
    model = OfOnesOwn(False)
    with REFUSED:
        fs.train_step(model, _batches("left"), _sgd(model))
