"""Every causal language model of transformers: exact in parts, or refused by name."""

import copy
import re

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.attention.context_parallel.gradients import largest_differences, shared_gradients
from tests.harness.architectures import class_names, quiet, tiny_architecture
from tests.harness.device import mesh_here
from tests.harness.float64 import AllFloat64
from tests.harness.long_rows import PADDED, PLAIN, batch_of, plain_gradients, rows_of
from tests.harness.ranks import run_distributed

REASONS = (
    r"query heads|context parallelism runs around|does not let|computes something else on parts"
    r"|cannot run on parts of a row|differs on another rank"
)


def _judge(name: str) -> str:
    """``"exact"``, or why the model was refused.

    Raises:
        AssertionError: If it is neither.
    """
    fs.init_distributed(device_type="cpu")
    with quiet():
        try:
            model = tiny_architecture(name).double().eval()  # some have dropout
        except ValueError as error:
            return f"plain transformers cannot: {error}"
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        oracle = copy.deepcopy(model)
        mesh = mesh_here(cp=2)
        try:
            fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(), master_dtype=torch.float64)
        except fs.FsdpSftError as error:
            return f"not sharded: {error}"
        try:
            fs.use_context_parallel(model, mesh=mesh)
        except (ValueError, fs.UnsupportedModelError) as error:
            return str(error)
        with AllFloat64():
            for kind, lengths in ((PLAIN, [14]), (PADDED, [11, 5])):
                rows = rows_of(lengths, seed=1)
                try:
                    loss, gradients = plain_gradients(oracle, rows)
                except Exception as error:
                    return f"plain transformers cannot: {error}"
                try:
                    own, found = shared_gradients(model, mesh, batch_of(rows, kind))
                except fs.ModelLossError as error:
                    return f"no causal loss: {error}"
                assert abs(own - loss) < 1e-9 * abs(loss), (kind, own, loss)
                differences = largest_differences(found, gradients)
                largest = max(size for _, _, size in differences)
                for parameter, apart, size in differences:
                    assert apart < max(1e-8 * size, 1e-12 * largest), (kind, parameter, apart)
    return "exact"


@pytest.mark.slow
@pytest.mark.parametrize("name", class_names())
def test_it_is_exact_or_refused(name: str) -> None:
    verdicts = run_distributed(_judge, 2, name)
    print(f"{name}: {verdicts[0][:200]}")
    assert all(
        verdict == "exact"
        or verdict.startswith(("not sharded", "plain", "no causal"))
        or re.search(REASONS, verdict)
        for verdict in verdicts
    ), verdicts
