"""Bad input as a stranger gives it. Run with ``-s`` to read every message."""

import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.models import full, tiny_model
from tests.harness.places import ROOT, script
from tests.harness.ranks import run_distributed


def _expect(what: str, call: Any, message: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{what}\n    {type(caught.value).__name__}: {caught.value}")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return script("tiny_model").make_tokenizer(["some text"], vocab_size=270)


def test_ratios() -> None:
    model = tiny_model("llama")
    for ratio, message in (
        (7, "1 every block"),
        ("1/0", "a text such as '1/3'"),
        ("__import__('os')", "a text such as '1/3'"),
    ):
        _expect(f"apply_sac(model, {ratio!r})", lambda ratio=ratio: fs.apply_sac(model, ratio), message)
    assert all(
        not getattr(block, "gradient_checkpointing", False) for block in fs.find_blocks(model).values()
    )


def _check_meshes() -> None:
    _expect("build_mesh(dp_replicate=2) on 3 ranks", lambda: fs.build_mesh(dp_replicate=2), "the job has 3")
    _expect("build_mesh(dp_shard=2) on 3 ranks", lambda: fs.build_mesh(dp_shard=2), "the job has 3")


def test_meshes_that_do_not_divide() -> None:
    run_distributed(_check_meshes, 3)


def test_a_model_without_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    _expect("find_blocks of two linears", lambda: fs.find_blocks(model), "name the class with block_cls=")


def test_tokenizers(tokenizer: Any) -> None:
    import copy

    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    _expect("a tokenizer without chat template", lambda: fs.encode_chat(row, bare), "chat_template")
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    _expect(
        "a tokenizer without pad token", lambda: fs.SFTCollator(bare, max_length=8), "tokenizer.pad_token ="
    )


def test_rows(tokenizer: Any) -> None:
    user = {"role": "user", "content": "a"}
    for what, row, message in (
        ("an empty row", {}, "messages"),
        ("a row without messages", {"messages": []}, "message"),
        ("an unknown role", {"messages": [user, {"role": "robot", "content": "b"}]}, "robot"),
        ("content that is no text", {"messages": [user, {"role": "assistant", "content": 3}]}, "content"),
    ):
        _expect(what, lambda row=row: fs.encode_chat(row, tokenizer), message)
    only_user = {"messages": [user]}
    assert fs.encode_chat(only_user, tokenizer).num_targets == 0
    _expect("rows of only user turns", lambda: fs.filter_rows([only_user], tokenizer), "no_target")
    answered = {"messages": [user, {"role": "assistant", "content": "b"}]}
    kept, counts = fs.filter_rows([only_user, answered], tokenizer)
    assert (kept, counts) == ([answered], {"kept": 1, "no_target": 1})
    _expect("a bad row among good ones", lambda: fs.filter_rows([answered, {}], tokenizer), "row 1: ")


class Exploit:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def _check_files(folder: Path) -> None:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here())
    before = {name: full(p).clone() for name, p in model.named_parameters()}
    for suffix in (".safetensors", ".pt"):
        path = folder / f"full{suffix}"
        if suffix == ".safetensors":
            fs.save_full_state_dict(model, path)
        elif dist.get_rank() == 0:
            torch.save(before, path)
        if dist.get_rank() == 0:
            data = path.read_bytes()
            path.write_bytes(data[: len(data) * 2 // 3])
        dist.barrier()
        _expect(
            f"a truncated {path.name}",
            lambda p=path: fs.load_full_state_dict(model, p),
            str(path.name),
            Exception,
        )
    path, marker = folder / "pickled.pt", folder / "ran"
    if dist.get_rank() == 0:
        path.write_bytes(pickle.dumps({"model.norm.weight": Exploit(marker)}))
        torch.save({"model.norm.weight": Exploit(marker)}, folder / "object.pt")
    dist.barrier()
    for path in (folder / "pickled.pt", folder / "object.pt"):
        _expect(
            f"{path.name} holding an object",
            lambda p=path: fs.load_full_state_dict(model, p),
            path.name,
            Exception,
        )
    assert not marker.exists(), "nothing in the file ran"
    assert all(torch.equal(full(p), before[name]) for name, p in model.named_parameters()), (
        "the model is untouched"
    )


def test_files_that_are_cut_or_hostile(tmp_path: Path) -> None:
    run_distributed(_check_files, 2, tmp_path)


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
    print(f"one of {ranks} ranks raises in a step: over after {seconds:.0f} s\n{cause[:700]}")
    assert seconds < 30 + 40, "40 s of which are for starting, on a busy machine"
    assert re.search(r"rank\s+: 1 ", cause)
    assert "the GPU fell off the bus" in cause
