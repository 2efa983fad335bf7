"""Models with rows for new tokens against plain transformers, resized by hand in one process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import fsdp_sft as fs
from tests import plain as plainly
from tests.harness import multimodal
from tests.harness.architectures import tiny_architecture
from tests.harness.hf_folders import difference, plain, rewrite, save_tiny, tensors_of
from tests.harness.models import FLOAT32, VOCAB, full, ragged_batches
from tests.harness.ranks import mesh_here, on_ranks, run_distributed

NEW = VOCAB + 6
FAMILIES = ["llama", "qwen2-tied", "gemma3", "gpt2", "bert", "t5"]


def _oracle(folder: Path) -> Any:
    model = plain(folder)

    def tables() -> list[Any]:
        layers = (model.get_input_embeddings(), model.get_output_embeddings())
        return list({id(layer.weight): layer.weight for layer in layers if layer}.values())

    means = [weight.detach().double().mean(0) for weight in tables()]
    model.resize_token_embeddings(NEW, mean_resizing=False)
    for weight, mean in zip(tables(), means, strict=True):
        weight.data[VOCAB:] = mean.to(weight.dtype)
    return model


def _check(root: Path, mesh_shape: dict[str, int]) -> None:
    mesh = mesh_here(**mesh_shape)
    for folder in sorted(root.iterdir()):
        model: Any = fs.load_pretrained(
            folder, mesh=mesh, mp_policy=FLOAT32, new_vocab_size=NEW, freeze_towers=False
        )
        oracle = _oracle(folder)
        assert difference(model, oracle) == [], folder.name
        assert model.config.get_text_config().vocab_size == NEW
        assert model.config.to_diff_dict() == oracle.config.to_diff_dict()


@pytest.mark.parametrize(
    ("ranks", "mesh_shape", "families"),
    [(3, {}, FAMILIES[:1]), (4, {"dp_replicate": 2}, FAMILIES[:1]), (4, {"dp_replicate": 2}, FAMILIES)],
)
def test_new_rows_are_the_mean_of_the_old(
    tmp_path: Path, ranks: int, mesh_shape: dict[str, int], families: list[str]
) -> None:
    for family in families:
        save_tiny(tmp_path / family, family)
    # Its config has the vocabulary in the part that speaks of text.
    multimodal.tiny("gemma3").to(torch.bfloat16).save_pretrained(tmp_path / "nested")
    run_distributed(_check, ranks, tmp_path, mesh_shape)


@pytest.mark.parametrize("how", ["full", "adapters"])
@on_ranks(2)
def test_they_are_trained_saved_and_exported(saved: Path, tmp_path: Path, how: str) -> None:
    mesh, expected = mesh_here(), _oracle(saved)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": FLOAT32, "new_vocab_size": NEW}
    if how == "adapters":
        peft = pytest.importorskip("peft", reason="adapters need the 'peft' extra")
        whole, kind = ["embed_tokens", "lm_head"], {"r": 4, "task_type": "CAUSAL_LM"}
        lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=whole, **kind)
        options["peft_config"] = copy.deepcopy(lora)
        torch.manual_seed(0)
        expected = peft.get_peft_model(expected, lora).train()
    model = fs.load_pretrained(saved, **options)
    batch = dict(ragged_batches(1)[0])
    batch["input_ids"][:, 0] = NEW - 1
    theirs, ours = (
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for each in (expected, model)
    )
    loss, _ = plainly.step(expected, [expected(**batch).loss], [theirs])
    assert fs.train_step(model, [batch], ours, max_grad_norm=None).loss == pytest.approx(loss, rel=1e-6)
    head = model.get_output_embeddings().weight
    torch.testing.assert_close(full(head).detach(), expected.get_output_embeddings().weight.detach())
    fs.save_checkpoint(tmp_path / "steps", 1, model=model)
    again = fs.load_pretrained(saved, **options)
    fs.load_checkpoint(tmp_path / "steps", model=again)
    assert difference(again, model) == []
    if how == "full":
        small = fs.load_pretrained(saved, mesh=mesh)
        with pytest.raises(fs.CheckpointMismatchError, match=rf"another model: .*embed_tokens.*\b{NEW}\b"):
            fs.load_checkpoint(tmp_path / "steps", model=small)
    fs.export_hf(again, tmp_path / "out", dtype=torch.float32)
    torch.distributed.barrier()
    exported = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.config.vocab_size == NEW
    assert torch.equal(exported.get_output_embeddings().weight, full(head))


def _with_rows(folder: Path, *, size: int = NEW, weights: Path | None = None, **options: Any) -> Any:
    """A model of a folder with rows for new tokens, loaded from it or from another one."""
    model = fs.build_meta_model(folder, new_vocab_size=size)
    fs.load_weights(model, weights or folder, **options)
    return model


@pytest.mark.parametrize("config_of", ["new", "old"])
def test_a_checkpoint_that_has_the_rows_already(config_of: str, tmp_path: Path) -> None:
    _oracle(save_tiny(tmp_path / "old", "qwen2-tied")).save_pretrained(tmp_path / "new")
    model = _with_rows(tmp_path / config_of, weights=tmp_path / "new")
    assert difference(model, plain(tmp_path / "new")) == []


def test_a_head_that_is_missing_is_initialised_whole(saved: Path) -> None:
    rewrite(saved, {name: tensor for name, tensor in tensors_of(saved).items() if name != "lm_head.weight"})
    model = _with_rows(saved, missing="initialise")
    rows = model.lm_head.weight[VOCAB:]
    assert rows.isfinite().all()
    assert rows.unique(dim=0).shape[0] == NEW - VOCAB
    assert torch.equal(model.model.embed_tokens.weight, _oracle(saved).model.embed_tokens.weight)


@pytest.mark.parametrize("size", [1, VOCAB - 1, VOCAB])
def test_spare_rows_stay_as_they_are(size: int, saved: Path) -> None:
    assert difference(_with_rows(saved, size=size), plain(saved)) == []


def test_what_cannot_be_resized_says_so(tmp_path: Path) -> None:
    tiny_architecture("MarianForCausalLM").save_pretrained(tmp_path / "marian")
    with pytest.raises(fs.UnsupportedModelError, match=r"Marian\w+: its input embeddings keep \d+ rows"):
        fs.build_meta_model(tmp_path / "marian", new_vocab_size=500)
    # Its bias of the logits has a column, and not a row, for each token.
    config = tf.BartConfig(vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1)
    tf.BartForConditionalGeneration(config).save_pretrained(tmp_path / "bart")
    with pytest.raises(fs.CheckpointFormatError, match=r"final_logits_bias"):
        _with_rows(tmp_path / "bart")
