"""Mistakes that cost a run: told by name, with what to do, before anything is lost."""

import errno
import os
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import fsdp_sft as fs
from fsdp_sft._ranks import agree
from tests.harness.device import mesh_here
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import run_distributed


def _save(root: str, own_state: bool) -> None:
    rank = dist.get_rank()
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    window = ragged_batches(3)
    for length in (3, 3, 1):  # the last window of an epoch is short
        fs.train_step(model, window[:length], optimizer)
    state = {"rank": rank, "position": torch.tensor(7 * rank)} if own_state else None
    fs.save_checkpoint(root, 3, model=model, optimizer=optimizer, rank_state=state)


@pytest.mark.parametrize("own_state", [True, False])
def test_a_resume_on_other_ranks_says_what_becomes_of_the_batch(own_state: bool, tmp_path: Path) -> None:
    run_distributed(_save, 2, str(tmp_path), own_state)
    model = tiny_model("llama", seed=5)
    words = r"saved by 2 ranks and is loaded by 1: .* has 0\.5 times as many rows"
    with pytest.warns(UserWarning, match=words) as told:
        loaded = fs.load_checkpoint(tmp_path, model=model)
    assert len(told) == 1
    assert (loaded.world_size, loaded.rank_state) == (2, None)
    if own_state:
        assert [state["rank"] for state in loaded.rank_states] == [0, 1]
        assert [int(state["position"]) for state in loaded.rank_states] == [0, 7]
    else:
        assert loaded.rank_states == (None, None)


def test_a_resume_on_as_many_ranks_says_nothing(tmp_path: Path) -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fs.train_step(model, ragged_batches(2), optimizer)
    fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, rank_state={"a": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = fs.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert (loaded.world_size, loaded.rank_state, loaded.rank_states) == (1, {"a": 1}, ({"a": 1},))


def test_float16_without_a_scaler() -> None:
    model, batches = tiny_model("llama").half(), ragged_batches(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.warns(UserWarning, match=r"float16 without a scaler: .*torch\.amp\.GradScaler"):
        fs.train_step(model, batches, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.train_step(model, batches, optimizer)


@pytest.mark.parametrize("call", ["train_step", "evaluate"])
def test_ids_that_are_no_integers(call: str) -> None:
    model, batches = tiny_model("llama"), ragged_batches(1)
    batches[0]["input_ids"] = batches[0]["input_ids"].float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(fs.BatchError, match=r"input_ids are torch.float32, .*make them torch.long"):
        fs.evaluate(model, batches) if call == "evaluate" else fs.train_step(model, batches, optimizer)


def test_a_schedule_that_is_stepped_twice() -> None:
    model, batches = tiny_model("llama"), ragged_batches(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    silent = [{**batches[0], "labels": torch.full_like(batches[0]["labels"], -100)}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.train_step(model, batches, optimizer, scheduler=schedule)
        saved = schedule.state_dict()
        fs.train_step(model, batches, optimizer, scheduler=schedule)
        schedule.load_state_dict(saved)  # a step of the past
        fs.train_step(model, batches, optimizer, scheduler=schedule)
        warnings.filterwarnings("ignore", message="a window has no targets")
        assert fs.train_step(model, silent, optimizer, scheduler=schedule).skipped
        schedule.step()  # which train_step has not done
        fs.train_step(model, batches, optimizer, scheduler=schedule)
        own: Any = SimpleNamespace(optimizer=optimizer, step=lambda: None, last_epoch=None)  # without a hash
        fs.train_step(model, batches, optimizer, scheduler=own)
        fs.train_step(model, batches, optimizer, scheduler=own)
    fs.train_step(model, batches, optimizer, scheduler=schedule)
    schedule.step()
    with pytest.warns(UserWarning, match=r"LambdaLR was stepped once since .* leave out scheduler\.step\(\)"):
        fs.train_step(model, batches, optimizer, scheduler=schedule)


def test_dtypes_by_their_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"such as torch\.bfloat16, got 'half a byte'"):
        fs.export_hf(tiny_model("llama"), tmp_path / "out", dtype="half a byte")
    with pytest.raises(ValueError, match="frozen_dtype must be a"):
        fs.load_pretrained(tmp_path, mesh=None, frozen_dtype="int4")


def test_a_disk_that_has_no_room_for_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    fs.save_checkpoint(tmp_path, 1, model=model)
    need = sum(p.numel() * p.element_size() for p in model.parameters())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=need - 1))
    with pytest.raises(
        OSError, match=r"saving .*step-2 takes 0\.\d+ GiB and .* has 0\.\d+ GiB free: make room"
    ) as error:
        fs.save_checkpoint(tmp_path, 2, model=model)
    assert error.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-1"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2 * need))
    fs.save_checkpoint(tmp_path, 2, model=model)


@pytest.mark.parametrize("call", ["save", "export", "full"])
def test_a_disk_that_fills_up_meanwhile(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = tiny_model("llama")
    monkeypatch.setattr(os, "pwrite", full)
    calls = {
        "save": lambda: fs.save_checkpoint(tmp_path, 2, model=model),
        "export": lambda: fs.export_hf(model, tmp_path / "out"),
        "full": lambda: fs.save_full_state_dict(model, tmp_path / "model.safetensors"),
    }
    said = rf"No space left on device: writing [\d,]+ bytes to {tmp_path}/.*; its file system has [\d,]+"
    with pytest.raises(OSError, match=said) as error:
        calls[call]()
    assert error.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
            "[10.0.0.7]:3742. This is typically caused by a remote worker crashing. Check the logs",
            "Connection closed by peer [10.0.0.7]:3742",
        ),
        ("Timed out waiting 1800000ms for recv operation to complete\nmore", None),
        ("", "RuntimeError"),
    ],
)
def test_what_gloo_says_of_a_lost_rank_is_one_sentence(text: str, said: str | None) -> None:
    said = said or "Timed out waiting 1800000ms for recv operation to complete"
    with pytest.raises(fs.LostRankError) as error, agree.answered():
        raise RuntimeError(text)
    assert f"{said}); end the job and start it again" in str(error.value)


def test_arguments_of_another_kind() -> None:
    calls: dict[str, Any] = {
        "tokenizer must be a tokenizer, .* got a str": lambda: fs.SFTCollator("some/model", max_length=8),
        "tokenizer must be a tokenizer, .* got a list": lambda: fs.filter_rows(object(), [{}]),
        "data must be the rows, or their number, got str": lambda: fs.ResumableSampler("rows.jsonl"),
        "data must be the rows, or their number, got generator": lambda: fs.ResumableSampler(r for r in ()),
    }
    for words, call in calls.items():
        with pytest.raises(TypeError, match=words):
            call()


def test_an_optimizer_of_which_nothing_is_trained() -> None:
    model: Any = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    model.more = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(fs.OptimizerError, match="no parameter of the optimizer is trained"):
        fs.train_step(model, ragged_batches(1), optimizer)


def test_a_guard_that_is_not_entered() -> None:
    with pytest.raises(RuntimeError, match="notes signals within its block"):
        fs.PreemptionGuard().should_stop()


def _a_loss_that_raises() -> None:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(Exception, match="input_id") as error:
        fs.train_step(
            model, ragged_batches(1), optimizer, loss_fn=lambda model, batch: model(batch["input_id"])
        )
    assert "all_gather_state" not in str(error.value)


def test_a_loss_that_raises_before_the_first_forward_says_so() -> None:
    run_distributed(_a_loss_that_raises, 2)


def _warned(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


def test_a_model_that_is_left_in_eval_mode() -> None:
    noisy, plain = tiny_model("gpt2", resid_pdrop=0.1), tiny_model("llama")
    for model, words in ((noisy, "trained without its dropout: call model.train()"), (plain, None)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model.eval()
        told = [text for _ in range(2) for text in _warned(_step(model, optimizer))]
        assert [words in text for text in told] == [True] * (words is not None)
        model.train()
        assert _warned(_step(model, optimizer)) == []


def _step(model: Any, optimizer: Any, **options: Any) -> Any:
    return lambda: fs.train_step(model, ragged_batches(1), optimizer, **options)


def test_an_optimizer_of_a_part() -> None:
    model: Any = tiny_model("llama")
    optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.01)
    (told,) = _warned(_step(model, optimizer))
    assert re.match(r"\d+ parameters that require gradients are in no optimizer \(model.embed_tokens", told)
    assert _warned(_step(model, optimizer)) == []
    model = tiny_model("llama")  # either piece of advice
    optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.01)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert _warned(_step(model, optimizer)) == []


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("made in time and loaded", None),
        ("made after the load", "made after load_checkpoint sets its first rates again"),
        ("not loaded", "goes on from step 2 and its LambdaLR begins at 0"),
    ],
)
def test_a_schedule_of_a_loaded_optimizer(tmp_path: Path, way: str, words: str | None) -> None:
    def begun() -> tuple[Any, Any]:
        model = tiny_model("llama")
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def scheduled(optimizer: Any) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 0.5**step)

    model, optimizer = begun()
    schedule = scheduled(optimizer)
    for _ in range(2):
        fs.train_step(model, ragged_batches(1), optimizer, scheduler=schedule)
    fs.save_checkpoint(
        tmp_path, 2, model=model, optimizer=optimizer, train_state={"s": schedule.state_dict()}
    )
    model, optimizer = begun()
    schedule = None if way == "made after the load" else scheduled(optimizer)
    loaded = fs.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    schedule = schedule or scheduled(optimizer)
    if way != "not loaded":
        schedule.load_state_dict(loaded.train_state["s"])
    told = [_warned(_step(model, optimizer, scheduler=schedule)) for _ in range(2)]
    assert [[words in text for text in texts] for texts in told] == [[True] * (words is not None), []]


def test_a_checkpoint_without_its_optimizer(tmp_path: Path) -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    fs.train_step(model, ragged_batches(1), optimizer)
    fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    for given in (False, True):
        model = tiny_model("llama", seed=3)
        optimizer = torch.optim.AdamW(model.parameters())
        fs.load_checkpoint(tmp_path, model=model, optimizer=optimizer if given else None)
        fs.evaluate(model, ragged_batches(1))
        told = [text for _ in range(2) for text in _warned(_step(model, optimizer))]
        assert ["loaded from step 1 without the optimizer" in text for text in told] == [True] * (not given)


def test_labels_of_padding(caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.randint(5, 60, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    ids[1, 8:] = 0
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
    for _ in range(2):
        fs.train_step(model, [batch], optimizer)
    (told,) = [text for text in caplog.messages if "padding" in text]
    assert told.startswith("4 labels are of padding (attention_mask 0)")
    caplog.clear()
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fs.train_step(model, [{**batch, "labels": ids.masked_fill(mask == 0, -100)}], optimizer)
    assert caplog.messages == []


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients(off: Any) -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with off(), pytest.raises(RuntimeError, match=r"gradients are off here .*call train_step outside"):
        fs.train_step(model, ragged_batches(1), optimizer)
    fs.train_step(model, ragged_batches(1), optimizer)


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = tiny_model("llama")
    assert fs.save_checkpoint("~/checkpoints", 1, model=model).path == tmp_path / "checkpoints" / "step-1"
    assert fs.load_checkpoint("~/checkpoints", model=model).step == 1
    fs.export_hf(model, "~/out")
    fs.build_meta_model("~/out")
    with fs.MetricLogger(jsonl="~/metrics.jsonl", stdout=False) as log:
        log.log({"loss": 1.0}, 1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == [
        *("checkpoints", "metrics.jsonl", "out")
    ]


def test_the_best_without_a_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    for step in (1, 2):
        fs.save_checkpoint(tmp_path, step, model=model, keep_last=1, keep_best=1)
    assert "keep_best=1 (no step was saved with a metric=, so none is the best): deleted" in caplog.text


def _adapters_after_sharding() -> None:
    peft = pytest.importorskip("peft")
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here())
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(fs.UnsupportedModelError, match=r"are not sharded .*adapters by add_adapters"):
        fs.train_step(model, ragged_batches(1), optimizer)


def test_adapters_after_sharding() -> None:
    run_distributed(_adapters_after_sharding, 2)
