"""The worked example in ``planner/replay.py`` is what the replay does."""

import re

import pytest
from transformers import LlamaConfig

from fsdp_sft.planner import replay
from fsdp_sft.planner.model import Skeleton, build_skeleton
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.trace import trace

MIB = 1 << 20
ALWAYS = ("parameters (shards)", "optimizer states", "cuBLAS workspace")
LETTERS = {
    "a": (replay.ALL_GATHER,),
    "k": ("activations kept",),
    "g": (replay.WHOLE_GRADIENTS,),
    "s": (replay.REDUCE_SCATTER,),
    "o": ("gradients (shards)",),
    "w": (replay.WORKING, replay.HEAD, "optimizer at work"),
}


def _bar(skeleton: Skeleton, held: dict[str, int]) -> tuple[int, str]:
    """MiB beside what is always there, and the letters of a line of the picture."""
    gathered = held.get(replay.UNSHARDED, 0)
    is_block = gathered >= 2 * sum(p.elements for p in skeleton.groups[0].parameters)
    sizes = {"V": 0 if is_block else gathered, "B": gathered if is_block else 0}
    sizes |= {letter: sum(held.get(part, 0) for part in parts) for letter, parts in LETTERS.items()}
    total = sum(held.values()) - sum(held[part] for part in ALWAYS)
    return round(total / MIB), "".join(letter * round(size / (8 * MIB)) for letter, size in sizes.items())


def test_the_picture_is_what_the_replay_does(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=8192,
        tie_word_embeddings=False,
    )
    setup = Run(num_gpus=4, micro_batch_size=1, seq_length=1024, attention_mask=False)
    skeleton = build_skeleton(config, setup)
    seen: list[tuple[int, str]] = []
    look = replay._Step.look

    def looks(step: replay._Step, phase: str, part: str = "", extra: int = 0) -> None:
        seen.append(_bar(skeleton, {**step.held, part: step.held.get(part, 0) + extra}))
        look(step, phase, part, extra)

    monkeypatch.setattr(replay._Step, "look", looks)
    phase, parts, _ = replay.replay(skeleton, trace(skeleton, setup), setup)
    lines = re.findall(r" (\d+)  ([VBakgsow]{4,})(?: .*)?$", replay.__doc__ or "", re.MULTILINE)
    drawn = [(int(mib), bar) for mib, bar in lines]
    assert len(drawn) == 15
    moments = iter(seen)
    for line in drawn:
        assert any(line == moment for moment in moments), f"{line} is not what follows in the replay"
    assert max(seen) == max(drawn)
    assert (phase, round(sum(parts[part] for part in ALWAYS) / MIB)) == ("loss", 176)
