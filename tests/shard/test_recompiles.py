"""Compiled blocks have room for their variants."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.harness.models import tiny_model


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    from torch._dynamo import config

    torch.compiler.reset()
    with config.patch(recompile_limit=config.recompile_limit):
        yield
    torch.compiler.reset()


def _compiled_variants(lengths: int) -> int:
    """Graphs compiled in training with ragged rows and evaluations in between."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model = tiny_model("llama")
    fs.apply_sac(model, "1/3")
    fs.compile_blocks(model, backend=backend, dynamic=False)
    for length in range(2, 2 + lengths):
        ids = torch.arange(3, 3 + length)[None]
        model.train()(input_ids=ids).logits.sum().backward()
        with torch.no_grad():
            model.eval()(input_ids=ids)
    return len(graphs)


def test_ragged_rows_and_evaluations_are_compiled_to_the_last() -> None:
    one = _compiled_variants(1)
    torch.compiler.reset()
    assert _compiled_variants(3) == 3 * one
