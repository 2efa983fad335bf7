"""Rows padded on the left: the loss of the same rows padded on the right, or an error in the first step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch.nn.utils.rnn import pad_sequence

import fsdp_sft as fs
from fsdp_sft._model.forward import TOLERANCES
from fsdp_sft.sampling.verify import left_padding_error
from tests.harness.architectures import class_names, quiet, tiny_architecture
from tests.harness.device import mesh_here
from tests.harness.ranks import on_ranks

ROWS = [list(range(20, 20 + length)) for length in (9, 4, 7, 6)]
# Every class of transformers 5.23 and 5.24 whose logits of a row move with padding on its left.
MOVED = [
    "Bart",
    "Beam",
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
    def padded(given: list[list[int]], filler: int) -> torch.Tensor:
        tensors = [torch.tensor(values) for values in given]
        return pad_sequence(tensors, batch_first=True, padding_value=filler, padding_side=side)

    masks, labels = ([[1] * len(row) for row in rows], [[-100, *row[1:]] for row in rows])
    return [
        {"input_ids": padded(rows, 0), "attention_mask": padded(masks, 0), "labels": padded(labels, -100)}
    ]


def _step(model: Any, batches: list[dict[str, Any]], **options: Any) -> fs.StepResult:
    return fs.train_step(model, batches, torch.optim.SGD(model.parameters(), lr=0.0), **options)


class OfOnesOwn(torch.nn.Module):
    """Without a config: sums the embeddings so far, those of padding too if it does not heed its mask."""

    def __init__(self, heeds_mask: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.heeds_mask = torch.nn.Embedding(40, 8), heeds_mask
        self.lm_head = torch.nn.Linear(8, 40, bias=False)

    def forward(self, input_ids: Any, attention_mask: Any = None, **_: Any) -> Any:
        seen = attention_mask[..., None] if self.heeds_mask and attention_mask is not None else 1
        return SimpleNamespace(logits=self.lm_head((self.embedding(input_ids) * seen).cumsum(1)))


def _model(kind: str) -> Any:
    if "mask" in kind:
        return OfOnesOwn(kind == "heeds its mask")
    family, _, dtype = kind.partition(" in ")
    return tiny_architecture(f"{family}ForCausalLM").to(getattr(torch, dtype or "float32"))


@pytest.mark.parametrize("kind", ["Qwen3", "Qwen3 in float64", "OPT", "Bloom", "Mamba", "heeds its mask"])
def test_these_read_rows_the_same_on_either_side(kind: str) -> None:
    model = _model(kind)
    right, left = (_step(model, _batches(side)).loss for side in ("right", "left"))
    assert [left, fs.evaluate(model, _batches("left")).loss] == pytest.approx([right] * 2, rel=1e-5)


def _refused(model: Any, batches: list[dict[str, Any]]) -> None:
    for call in (lambda: _step(model, batches), lambda: fs.evaluate(model, batches)):
        with pytest.raises(fs.UnsupportedModelError, match="reads a row behind padding differently"):
            call()


@pytest.mark.parametrize("kind", ["GPTNeo", "RecurrentGemma", "Rwkv", "Beam", "no mask is heeded"])
def test_these_are_refused_padded_on_the_left_and_only_there(kind: str) -> None:
    model = _model(kind)
    _step(model, _batches("right"))
    _refused(model, _batches("left"))
    assert not _step(model, _batches("left"), check=False).skipped
    assert fs.evaluate(model, _batches("right")).num_targets


def test_positions_of_each_row_alone_make_it_right() -> None:
    model = tiny_architecture("GPTNeoForCausalLM")
    (batch,) = _batches("left")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    right = _step(model, _batches("right")).loss
    assert _step(model, [{**batch, "position_ids": positions}]).loss == pytest.approx(right, rel=1e-5)
    _refused(model, [batch])


@on_ranks(2)
def test_all_ranks_refuse_what_one_has() -> None:
    model = fs.shard_model(tiny_architecture("GPTNeoForCausalLM"), mesh=mesh_here())
    alone = _batches("left", ROWS[:1])  # one row a rank: nobody has padding
    assert not _step(model, alone).skipped
    _refused(model, _batches("left", ROWS[:2]) if dist.get_rank() else alone)
    assert not _step(model, alone).skipped, "nothing was lost"


@pytest.mark.slow
def test_every_class() -> None:
    kinds = {name.removesuffix("ForCausalLM"): name for name in class_names()}
    with quiet():
        moved = {
            kind
            for kind in kinds.keys() - NOT_RUN
            if left_padding_error(tiny_architecture(kinds[kind])) > TOLERANCES[torch.float32]
        }
    assert moved == set(MOVED)
