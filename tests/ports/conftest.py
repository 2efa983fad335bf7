"""A tiny model and chats."""

import json
from pathlib import Path

import pytest

from tests.harness.places import EXAMPLES, script
from tests.ports.originals import NUM_ROWS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and chats."""
    folder = tmp_path_factory.mktemp("ports")
    rows = [(f"What is {i} and {i}?", f"It is {2 * i}" + " indeed" * (i % 5)) for i in range(NUM_ROWS)]
    script("tiny_model", EXAMPLES).make_tiny_model(folder / "model", [text for row in rows for text in row])
    chats = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
        for ask, answer in rows
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder
