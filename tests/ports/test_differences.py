"""Where an original differs from its port, and what did not work when these loops were first tried."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import fsdp_sft as fs
from tests.harness.places import script
from tests.harness.ranks import run_distributed
from tests.ports.cases import PORTS
from tests.ports.originals import of_nested, scored

# What did not work when these loops were first tried


def _frictions(folder: Path, out: Path) -> list[str]:
    fs.init_distributed()
    port = script("verl_sft", PORTS)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    objective = port.TokenLoss("skip")
    loss = {"loss_fn": objective.loss, "count_fn": objective.count}
    rows = port.read_rows(folder / "chats.jsonl", tokenizer, 64)
    batch = port.collate(rows[:3])
    plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokens = torch.cat([-scored(plain, row) for row in of_nested(batch)])
    expected = pytest.approx(float(tokens.detach().mean()), rel=1e-6)
    options = {"mp_policy": MixedPrecisionPolicy()}
    worked = []

    # A loss over log-probabilities where two ranks share rows, of nested batches; other rows are noticed.
    mesh = fs.build_mesh(cp=2)
    model = fs.load_pretrained(folder / "model", mesh=mesh, **options)
    fs.use_context_parallel(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(fs.BatchError, match="different batches"):
        fs.train_step(model, [port.collate(rows[dist.get_rank() : 3])], optimizer, **loss)
    assert fs.train_step(model, [batch], optimizer, **loss).loss == expected
    if importlib.util.find_spec("tensordict"):
        from tensordict import TensorDict

        assert fs.train_step(model, [TensorDict(batch, [3])], optimizer, **loss).loss == expected
    worked.append("cp")

    # A model that the caller has grouped, as verl and prime-rl do.
    grouped = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()
    for layer in grouped.model.layers:
        fully_shard(layer)
    fully_shard(grouped)
    optimizer = torch.optim.AdamW(grouped.parameters(), lr=1e-3)
    assert fs.train_step(grouped, [batch], optimizer, **loss).loss == expected
    assert fs.train_step(grouped, [batch], optimizer, **loss).loss < float(tokens.mean())
    worked.append("groups of one's own")

    # Weights for an inference server, without a file.
    fs.export_hf(grouped, out / "export", tokenizer=tokenizer)
    written = load_file(out / "export" / "model.safetensors")
    sent = {name: tensor.clone() for name, tensor in fs.iter_hf_tensors(grouped)}
    assert sent.keys() == written.keys()
    assert all(torch.equal(sent[name], written[name]) for name in sent)
    worked.append("tensors")
    return worked


def test_what_did_not_work_at_first(folder: Path, tmp_path: Path) -> None:
    for worked in run_distributed(_frictions, 2, folder, tmp_path):
        assert worked == ["cp", "groups of one's own", "tensors"]
