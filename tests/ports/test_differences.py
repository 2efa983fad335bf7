"""Where an original differs from its port, and what did not work when these loops were first tried."""

import importlib.util
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import fsdp_sft as fs
from tests.harness.places import script
from tests.harness.ranks import run_distributed
from tests.ports.cases import PORTS, VERL, across, check_steps, plain, run, train_original
from tests.ports.originals import NUM_ROWS, all_rows, log_probs, of_nested, scored


def test_verl_predicts_the_first_token_of_the_next_row(folder: Path, tmp_path: Path) -> None:
    """If every token is trained, as in pre-training; the port does so only when it is asked to."""
    rows = [{"input_ids": [i + 3, 2 * i + 5, 40 - i], "loss_mask": [1, 1, 1]} for i in range(NUM_ROWS)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    losses = {}
    for mode in ("cross", "skip"):
        ran = run_distributed(run, 1, VERL, folder, str(data), tmp_path / mode, "--first-tokens", mode)
        results, windows = across(ran)
        losses[mode] = [result.loss for result in results]
        if mode == "cross":
            check_steps(results, train_original(VERL, folder, windows)[1])
    with torch.no_grad():
        model = plain(folder)
        own = torch.cat([-log_probs(model, row) for row in all_rows(windows[0])])
    assert losses["skip"][0] == pytest.approx(float(own.mean()), rel=1e-6)
    assert losses["cross"][-1] > losses["skip"][-1] + 0.1  # what follows is another row, which none can know


def test_a_nan_that_prime_rl_leaves_out_still_reaches_its_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))
    torch.nan_to_num((weight * torch.nan).sum(), nan=0.0).backward()
    assert weight.grad is not None
    assert weight.grad.isnan().all()
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    with pytest.raises(fs.NonFiniteGradientError):
        fs.train_step(
            model,
            [torch.full((1, 2), torch.nan)],
            torch.optim.AdamW(model.parameters()),
            loss_fn=lambda model, batch: model(batch).sum(),
            count_fn=lambda batch: 1,
        )
    assert torch.equal(model.weight, before)


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


def _tensor_dicts(folder: Path, out: Path) -> Any:
    from tensordict import TensorDict

    module = script("verl_sft", PORTS)
    collate = module.collate

    def collated(rows: list[Any]) -> Any:
        return TensorDict(collate(rows), batch_size=[len(rows)])

    with mock.patch.object(module, "collate", collated):
        return run(VERL, folder, "chats.jsonl", out)


def test_verl_batches_may_be_tensor_dicts(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensordict")
    results, windows = across(run_distributed(_tensor_dicts, 2, folder, tmp_path))
    check_steps(results, train_original(VERL, folder, windows)[1])
