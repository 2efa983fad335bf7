"""Mistakes that cost a run, or train something else than was meant: told by name, with what to do."""

import errno
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import fsdp_sft as fs
from fsdp_sft._ranks import agree
from fsdp_sft.metrics.plot import _read
from tests.harness.chats import TOKENIZERS, chat
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import mesh_here, on_ranks, run_distributed


@pytest.fixture
def llama() -> Any:
    return tiny_model("llama")


def _told(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


def _step(model: Any, optimizer: Any, **options: Any) -> list[str]:
    """What is said of a step."""
    return _told(lambda: fs.train_step(model, ragged_batches(1), optimizer, **options))


# --- saves and resumes ------------------------------------------------------------------------------------


def _save(root: str, own_state: bool) -> None:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here())
    optimizer, window = _sgd(model), ragged_batches(3)
    for length in (3, 3, 1):  # the last window of an epoch is short
        fs.train_step(model, window[:length], optimizer)
    state = {"position": torch.tensor(7 * dist.get_rank())} if own_state else None
    fs.save_checkpoint(root, 3, model=model, optimizer=optimizer, rank_state=state)


@pytest.mark.parametrize("own_state", [True, False])
def test_a_resume_on_other_ranks_says_what_becomes_of_the_batch(own_state: bool, tmp_path: Path) -> None:
    run_distributed(_save, 2, str(tmp_path), own_state)
    with pytest.warns(
        UserWarning, match=r"saved by 2 ranks and is loaded by 1: .* has 0\.5 times as many rows"
    ) as told:
        loaded = fs.load_checkpoint(tmp_path, model=tiny_model("llama", seed=5))
    assert (len(told), loaded.world_size, loaded.rank_state) == (1, 2, None)
    assert list(loaded.rank_states) == ([{"position": 0}, {"position": 7}] if own_state else [None, None])


def test_a_checkpoint_without_its_optimizer(tmp_path: Path) -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    fs.train_step(model, ragged_batches(1), optimizer)
    fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, rank_state={"a": 1})
    for given in (False, True):
        model = tiny_model("llama", seed=3)
        optimizer = torch.optim.AdamW(model.parameters())
        loaded = fs.load_checkpoint(tmp_path, model=model, optimizer=optimizer if given else None)
        assert (loaded.world_size, loaded.rank_state, loaded.rank_states) == (1, {"a": 1}, ({"a": 1},))
        fs.evaluate(model, ragged_batches(1))
        assert [
            "loaded from step 1 without the optimizer" in text
            for _ in range(2)
            for text in _step(model, optimizer)
        ] == [True] * (not given)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("made in time and loaded", None),
        ("made after the load", "made after load_checkpoint sets its first rates again"),
        ("not loaded", "goes on from step 2 and its LambdaLR begins at 0"),
        ("changed by hand", None),
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
    if way == "changed by hand":
        optimizer.param_groups[0]["lr"] *= 0.5
        schedule.base_lrs = [0.5 * rate for rate in schedule.base_lrs]
    told = [_step(model, optimizer, scheduler=schedule) for _ in range(2)]
    assert [[words in text for text in texts] for texts in told] == [[True] * (words is not None), []]


def test_a_disk_that_has_no_room_for_a_step(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.save_checkpoint(tmp_path, 1, model=llama)
    need = sum(p.numel() * p.element_size() for p in llama.parameters())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=need - 1))
    with pytest.raises(
        OSError, match=r"saving .*step-2 takes 0\.\d+ GiB and .* has 0\.\d+ GiB free: make room"
    ) as error:
        fs.save_checkpoint(tmp_path, 2, model=llama)
    assert (error.value.errno, [path.name for path in tmp_path.glob("*step*")]) == (errno.ENOSPC, ["step-1"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2 * need))
    fs.save_checkpoint(tmp_path, 2, model=llama)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, folder: fs.save_checkpoint(folder, 2, model=model),
        lambda model, folder: fs.export_hf(model, folder / "out"),
        lambda model, folder: fs.save_full_state_dict(model, folder / "model.safetensors"),
    ],
    ids=["save", "export", "full"],
)
def test_a_disk_that_fills_up_meanwhile(
    call: Any, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        OSError,
        match=rf"No space left on device: writing [\d,]+ bytes to {tmp_path}/.*; its file system has [\d,]+",
    ):
        call(llama, tmp_path)


def test_the_best_without_a_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        fs.save_checkpoint(tmp_path, step, model=tiny_model("llama"), keep_last=1, keep_best=1)
    assert "keep_best=1 (no step was saved with a metric=, so none is the best): deleted" in caplog.text


def test_the_home_folder(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fs.save_checkpoint("~/checkpoints", 1, model=llama).path == tmp_path / "checkpoints" / "step-1"
    assert fs.load_checkpoint("~/checkpoints", model=llama).step == 1
    fs.export_hf(llama, "~/out")
    fs.build_meta_model("~/out")
    with fs.MetricLogger(jsonl="~/metrics.jsonl", stdout=False) as log:
        log.log({"loss": 1.0}, 1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == [
        "checkpoints",
        "metrics.jsonl",
        "out",
    ]


def test_a_log_that_a_second_run_begins_anew(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for steps, loss in ((range(1, 13), 5.0), (range(1, 5), 4.0)):
        with fs.MetricLogger(jsonl=log, stdout=False) as logger:
            for step in steps:
                logger.log({"loss": loss}, step)
    assert {step: row["loss"] for step, row in _read(log).items()} == dict.fromkeys(range(1, 5), 4.0)
    with fs.MetricLogger(jsonl=log, stdout=False) as logger:  # a resume, and two logs of one step
        logger.log({"loss": 3.0}, 4)
        logger.log({"eval_loss": 2.0}, 4)
    assert ([row["loss"] for row in _read(log).values()], _read(log)[4]["eval_loss"]) == (
        [4.0, 4.0, 4.0, 3.0],
        2.0,
    )


# --- steps ------------------------------------------------------------------------------------------------


def test_float16_without_a_scaler(llama: Any) -> None:
    optimizer = _sgd(llama.half())
    (told,) = _step(llama, optimizer)
    assert re.search(r"float16 without a scaler: .*torch\.amp\.GradScaler", told)
    assert _step(llama, optimizer) == []


@pytest.mark.parametrize("call", ["train_step", "evaluate"])
def test_ids_that_are_no_integers(call: str, llama: Any) -> None:
    batches = ragged_batches(1)
    batches[0]["input_ids"] = batches[0]["input_ids"].float()
    with pytest.raises(fs.BatchError, match=r"input_ids are torch.float32, .*make them torch.long"):
        fs.evaluate(llama, batches) if call == "evaluate" else fs.train_step(llama, batches, _sgd(llama))


def test_a_schedule_that_is_stepped_twice() -> None:
    model, batches = tiny_model("llama"), ragged_batches(1)
    optimizer = _sgd(model)
    fs.train_step(model, batches, optimizer)
    schedule = LambdaLR(optimizer, lambda step: float(step > 0))  # a new one, which begins at 0
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
    (told,) = _step(model, optimizer, scheduler=schedule)
    assert re.search(r"LambdaLR was stepped once since .* leave out scheduler\.step\(\)", told)


def test_a_window_without_targets(llama: Any) -> None:
    (batch,), optimizer = ragged_batches(1), _sgd(llama)
    window = [{**batch, "labels": torch.full_like(batch["labels"], -100)}]
    (told,) = _told(lambda: [fs.train_step(llama, window, optimizer) for _ in range(3)])
    assert "no targets on any rank, so its step is skipped" in told


def test_a_row_longer_than_the_model_was_made_for() -> None:
    model, ids = tiny_model("llama", max_position_embeddings=16), torch.arange(3, 21)[None]
    rows = [{"input_ids": row, "labels": row} for row in ([5, 6, 7] * 4, [9, 3] * 7)]
    packed = fs.PackedCollator(max_length=48)(rows)  # 26 tokens, of rows that are shorter
    batches = [packed, *({"input_ids": ids[:, :n], "labels": ids[:, :n]} for n in (16, 17, 18))]
    told = [_told(lambda b=batch: fs.train_step(model, [b], _sgd(model))) for batch in batches]
    assert ["17 tokens and LlamaForCausalLM was made for 16" in "".join(t) for t in told] == [0, 0, 1, 0]


def test_a_model_that_is_left_in_eval_mode() -> None:
    noisy, plain = tiny_model("gpt2", resid_pdrop=0.1), tiny_model("llama")
    for model, words in ((noisy, "trained without its dropout: call model.train()"), (plain, None)):
        optimizer = _sgd(model.eval())
        told = [words in text for _ in range(2) for text in _step(model, optimizer)]
        assert told == [True] * (words is not None)
        assert _step(model.train(), optimizer) == []


def test_an_optimizer_of_a_part_or_of_what_is_frozen(llama: Any) -> None:
    some = [_sgd(llama.lm_head), _sgd(llama.model.norm)]
    (told,) = _step(llama, some)
    assert re.match(r"28 parameters that require gradients are in no optimizer \(model.embed_tokens", told)
    assert _step(llama, some) == []
    model: Any = tiny_model("llama")  # the advice
    optimizer = _sgd(model.lm_head)
    model.model.requires_grad_(False)
    assert _step(model, optimizer) == []
    model.requires_grad_(False)
    model.more = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(fs.OptimizerError, match="no parameter of the optimizer is trained"):
        fs.train_step(model, ragged_batches(1), optimizer)


def test_labels_of_padding(caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.randint(5, 60, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:] = ids[1, 8:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
    for labels, said in ((ids.masked_fill(mask == 0, -100), 0), (ids, 1)):
        model = tiny_model("llama")
        optimizer = _sgd(model)
        for _ in range(2):
            fs.train_step(model, [{**batch, "labels": labels}], optimizer)
        told = [
            text for text in caplog.messages if text.startswith("4 labels are of padding (attention_mask 0)")
        ]
        assert len(told) == len(caplog.messages) == said


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients(off: Any, llama: Any) -> None:
    with off(), pytest.raises(RuntimeError, match=r"gradients are off here .*call train_step outside"):
        fs.train_step(llama, ragged_batches(1), _sgd(llama))


@pytest.mark.parametrize("where", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_not_finite(where: str, llama: Any) -> None:
    llama.get_parameter(where).data.fill_(torch.nan)
    with pytest.raises(fs.NonFiniteGradientError, match=rf"is nan at a loss of nan.* {where} hold"):
        fs.train_step(llama, ragged_batches(1), _sgd(llama))


def test_processes_that_have_not_met(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(fs.UnsupportedModelError, match=r"4 processes .*: call init_distributed\(\) first"):
        fs.train_step(llama, ragged_batches(1), _sgd(llama))
    monkeypatch.delenv("WORLD_SIZE")  # the advice for processes that are apart
    assert _step(llama, _sgd(llama)) == []


@on_ranks(2)
def test_a_model_that_was_never_sharded_and_losses_that_fail() -> None:
    model, batches = tiny_model("llama"), ragged_batches(1)
    with pytest.raises(fs.UnsupportedModelError, match=r"each of 2 processes would train .*shard_model"):
        fs.train_step(model, batches, _sgd(model))
    model = fs.shard_model(model, mesh=mesh_here())  # the advice
    for lost, said in (([1], "(that of rank 1 is"), ([0, 1], "(that of rank 0, 1 is")):
        scale = math.nan if dist.get_rank() in lost else 1.0
        options: dict[str, Any] = {"check": False, "loss_fn": lambda m, b, s=scale: s * fs.loss_sum(m, b)[0]}
        with pytest.raises(fs.NonFiniteGradientError, match=re.escape(f"{said} not finite)")):
            fs.train_step(model, batches, _sgd(model), **options)
    with pytest.raises(Exception, match="input_id") as error:  # before the first forward of the step
        fs.train_step(model, batches, _sgd(model), loss_fn=lambda model, batch: model(batch["input_id"]))
    assert "all_gather_state" not in str(error.value)
    assert not fs.train_step(model, batches, _sgd(model)).skipped


@on_ranks(2)
def test_adapters_after_sharding() -> None:
    peft = pytest.importorskip("peft")
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here())
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(fs.UnsupportedModelError, match=r"are not sharded .*adapters by add_adapters"):
        fs.train_step(model, ragged_batches(1), _sgd(model))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
            "[10.0.0.7]:3742. This is typically caused by a remote worker crashing. Check the logs",
            "Connection closed by peer [10.0.0.7]:3742",
        ),
        (
            "Timed out waiting 1800000ms for recv operation\nmore",
            "Timed out waiting 1800000ms for recv operation",
        ),
        ("", "RuntimeError"),
    ],
)
def test_what_gloo_says_of_a_lost_rank_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(fs.LostRankError) as error, agree.answered():
        raise RuntimeError(text)
    assert f"{said}); end the job and start it again" in str(error.value)


# --- arguments of another kind, and rows that say what nothing reads --------------------------------------

CHATML = TOKENIZERS["chatml"]
OWN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[END]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_arguments_of_another_kind(llama: Any, tmp_path: Path) -> None:
    learned, ids = tiny_model("gpt2", n_positions=16), torch.arange(3, 21)[None]
    calls: dict[str, tuple[type[Exception], Callable[[], object]]] = {
        "tokenizer must be a tokenizer, .* got a str": (
            TypeError,
            lambda: fs.SFTCollator("some/model", max_length=8),
        ),
        "tokenizer must be a tokenizer, .* got a list": (TypeError, lambda: fs.filter_rows(object(), [{}])),
        "their number, got str": (TypeError, lambda: fs.ResumableSampler("rows.jsonl")),
        "their number, got generator": (TypeError, lambda: fs.ResumableSampler(r for r in ())),
        "in_order=False hands out": (
            ValueError,
            lambda: fs.windows(
                DataLoader(ids, 1, sampler=fs.ResumableSampler(1), num_workers=1, in_order=False), 1
            ),
        ),
        r"a row has 18 tokens, and GPT2LMHeadModel has a table of 16 positions": (
            fs.BatchError,
            lambda: fs.train_step(learned, [{"input_ids": ids, "labels": ids}], _sgd(learned)),
        ),
        r"such as torch\.bfloat16, got 'half a byte'": (
            ValueError,
            lambda: fs.export_hf(llama, tmp_path / "out", dtype="half a byte"),
        ),
        "frozen_dtype must be a": (
            ValueError,
            lambda: fs.load_pretrained(tmp_path, mesh=None, frozen_dtype="int4"),
        ),
        r"filter_rows takes no train_om=: do you mean train_on\?": (
            TypeError,
            lambda: fs.filter_rows([], CHATML, train_om="all"),
        ),
        "SFTCollator takes no colour=: its options are chat_template, ": (
            TypeError,
            lambda: fs.SFTCollator(CHATML, max_length=9, colour="red"),
        ),
    }
    for words, (kind, call) in calls.items():
        with pytest.raises(kind, match=words):
            call()


def test_answers_that_are_cut_off() -> None:
    rows = [chat("a", "hello", "a longer question", "and its answer"), chat("a", "hi")]
    collate = fs.SFTCollator(CHATML, max_length=40)
    with pytest.warns(UserWarning, match="max_length leaves nothing of an answer"):
        collate(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collate(rows)
        fs.SFTCollator(CHATML, max_length=40, truncation="right")(rows)


def test_what_a_template_does_not_print() -> None:
    row = chat("q", "a")
    row["messages"][1]["content"] = [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "so"}]
    with pytest.raises(fs.ChatTemplateError, match="does not print the reasoning of message 1, 'why'"):
        fs.encode_chat(row, CHATML, chat_template=OWN)
    row = {**chat("q", "a"), "tools": [{"type": "function", "function": {"name": "find", "parameters": {}}}]}
    with pytest.warns(UserWarning, match="or the tools, so the model is trained without"):
        fs.encode_chat(row, CHATML, chat_template=OWN)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*or the tools, so the model is trained without")
        fs.encode_chat(row, CHATML, chat_template="{{ tools }}" + OWN)


@pytest.mark.parametrize(
    ("key", "meant"), [("tool_call", "tool_calls"), ("toolCalls", "tool_calls"), ("weig" + "th", "weight")]
)
def test_a_key_that_is_misspelt(key: str, meant: str) -> None:
    row = chat("q", "a")
    row["messages"][1][key] = []
    with pytest.raises(fs.RowError, match=rf"'{key}', which is not read: is it {meant}\?") as found:
        fs.encode_chat(row, CHATML)
    assert found.value.reason == "malformed"
    row = chat("q", "a")
    row["messages"][1] |= {"id": "7", "reason": "r", "name": "n"}
    fs.encode_chat(row, CHATML)


def test_the_row_of_a_batch_is_named() -> None:
    wrong = {"messages": [{"role": "robot", "content": "a"}]}
    with pytest.raises(fs.RowError, match=r"^row 1 of 2: messages\[0\] has the role 'robot'"):
        fs.SFTCollator(CHATML, max_length=64)([chat("q", "a"), wrong])
