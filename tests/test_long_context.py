"""The example for long rows as a person runs it: the same training at another cp, kinds of data, refusals."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness import launches
from tests.harness.forks import Program
from tests.harness.places import EXAMPLES, script

EXAMPLE = EXAMPLES / "long_context.py"
HELD_OUT = re.compile(r"held-out loss .*: (\S+) seeing the whole row, (\S+) seeing that half alone")
SHORT = ["--steps", "4", "--save-every", "2", "--seq-length", "128", "--dtype", "float32"]


def _alone(output: Path, *arguments: str, code: int = 0) -> str:
    """What one rank prints."""
    program = Program(EXAMPLE, "--output", str(output), *arguments, environment=launches.environment())
    ended, text = program.wait()
    assert ended == code, text[-3000:]
    return text


def _losses(output: Path) -> dict[int, float]:
    return {step: loss for step, loss, _ in launches.losses(output)}


def _held_out(text: str) -> torch.Tensor:
    return torch.tensor([(float(whole), float(half)) for whole, half in HELD_OUT.findall(text)])


def _cut_back_to(output: Path, step: int) -> None:
    """Leave what a run had when it was killed after it saved ``step``."""
    shutil.rmtree(output / "export")
    for folder in (output / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (output / "log.jsonl").unlink()


def _data(folder: Path) -> list[str]:
    """Arguments of a short run on a few rows, with a tiny model."""
    texts = [row["text"][:2000] for row in script("long_context").help_topics()[:8]]
    (folder / "topics.txt").write_text("\n\n".join(texts), encoding="utf-8")
    script("tiny_model").make_tiny_model(folder / "model", texts, max_length=128)
    return [*SHORT, "--data", str(folder / "topics.txt"), "--model", str(folder / "model")]


@pytest.mark.slow
def test_two_ranks_share_rows_and_one_goes_on_alone(tmp_path: Path) -> None:
    alone, shared, run = tmp_path / "alone", tmp_path / "shared", _data(tmp_path)
    shared_command = [*launches.torchrun(2, "--standalone"), str(EXAMPLE)]
    expected = _alone(alone, *run)
    text = launches.run([*shared_command, "--output", str(shared), *run, "--cp", "2"])
    assert _losses(shared) == pytest.approx(_losses(alone), rel=1e-5)
    assert _held_out(text) == pytest.approx(_held_out(expected), abs=2e-4)
    assert "cp=2" in text
    assert "peak memory of a rank in training:" in text

    whole = _losses(shared)
    _cut_back_to(shared, 2)
    text = _alone(shared, *run, "--resume")
    assert "going on after step 2" in text
    assert _losses(shared) == pytest.approx({step: whole[step] for step in (3, 4)}, rel=1e-5)
    exported, plain = (AutoModelForCausalLM.from_pretrained(output / "export") for output in (shared, alone))
    torch.testing.assert_close(exported.state_dict(), plain.state_dict(), rtol=1e-2, atol=1e-3)


def test_documents_are_cut_and_every_token_is_trained() -> None:
    example, tokenizer = (
        script("long_context"),
        script("tiny_model").make_tokenizer(["The sky is blue. Here we go."]),
    )
    texts = ["The sky is blue. " * 40, "Here we go."]
    rows = example.encode([{"text": text} for text in texts], tokenizer, 32)
    assert all(len(row.input_ids) <= 32 and row.labels == row.input_ids for row in rows)
    joined = [token for row in rows for token in row.input_ids]
    ends = [tokenizer.eos_token_id]
    assert joined == [token for text in texts for token in tokenizer(text).input_ids + ends]
    with pytest.raises(SystemExit, match="row 1 has none"):
        example.encode([{"text": "a"}, {"messages": []}], tokenizer, 32)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cp", "3"], "cp=3 makes 3 ranks, but the job has 1"),
        (["--model", "{model}", "--seq-length", "256"], "more than the 128 positions"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    tmp_path: Path, arguments: list[str], reason: str
) -> None:
    model = tmp_path / "model"
    script("tiny_model").make_tiny_model(model, ["Here we go."], max_length=128)
    text = _alone(tmp_path / "out", *[word.format(model=model) for word in arguments], code=1)
    assert reason in text
