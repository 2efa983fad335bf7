"""Bad input as a stranger gives it, and a rank that raises in a step: named, and soon."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fsdp_sft as fs
from tests.harness.places import ROOT, script
from tests.harness.ranks import run_distributed

USER = {"role": "user", "content": "a"}
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "an empty row": ({}, "messages"),
    "a row without messages": ({"messages": []}, "message"),
    "an unknown role": ({"messages": [USER, {"role": "robot", "content": "b"}]}, "robot"),
    "content that is no text": ({"messages": [USER, {"role": "assistant", "content": 3}]}, "content"),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return script("tiny_model").make_tokenizer(["some text"], vocab_size=270)


@pytest.mark.parametrize("what", ROWS)
def test_rows(what: str, tokenizer: Any) -> None:
    row, message = ROWS[what]
    with pytest.raises(ValueError, match=message):
        fs.encode_chat(row, tokenizer)


def test_a_bad_row_among_good_ones_is_named(tokenizer: Any) -> None:
    answered = {"messages": [USER, {"role": "assistant", "content": "b"}]}
    with pytest.raises(ValueError, match="row 1: "):
        fs.filter_rows([answered, {}], tokenizer)


def _check_meshes() -> None:
    for shape in ({"dp_replicate": 2}, {"dp_shard": 2}):
        with pytest.raises(ValueError, match="the job has 3"):
            fs.build_mesh(**shape)


def test_meshes_that_do_not_divide() -> None:
    run_distributed(_check_meshes, 3)


CRASH = """
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
import fsdp_sft as fs
from tests.harness.models import ragged_batches, tiny_model

@record
def main():
    context = fs.init_distributed(device_type="cpu")
    model = fs.shard_model(tiny_model("llama"), mesh=fs.build_mesh(device_type="cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = ragged_batches(6)[context.rank :: context.world_size]
    fs.train_step(model, batches, optimizer)
    if context.rank == 1:
        def fail(*_):
            raise RuntimeError("the GPU fell off the bus")
        model.model.layers[1].register_forward_hook(fail)
    fs.train_step(model, batches, optimizer)

main()
"""


# A start of torchrun and its ranks takes ten seconds.
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_raises_inside_a_step_ends_the_job_and_is_named(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "crash.py"
    script.write_text(CRASH)
    start = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            str(script),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    seconds = time.monotonic() - start
    assert done.returncode != 0
    cause = done.stderr[done.stderr.index("Root Cause") :]
    assert seconds < 30 + 40, "40 s of which are for starting, on a busy machine"
    assert re.search(r"rank\s+: 1 ", cause)
    assert "the GPU fell off the bus" in cause
