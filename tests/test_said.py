"""A run says what it does, a line each at INFO from rank 0, and objects print as a person would want."""

import logging
import re
from pathlib import Path

import torch

import fsdp_sft as fs
from tests.harness import chat_templates as ct
from tests.harness.device import mesh_here
from tests.harness.hf_folders import save_tiny
from tests.harness.places import EXAMPLES
from tests.harness.ranks import run_distributed


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _run(folder: Path, root: Path) -> tuple[list[str], str]:
    kept, logger = _Kept(), logging.getLogger("fsdp_sft")
    before = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        model = fs.load_pretrained(folder, mesh=mesh_here())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fs.save_checkpoint(root / "steps", 1, model=model, optimizer=optimizer)
        fs.load_checkpoint(root / "steps", model=model, optimizer=optimizer)
        fs.export_hf(model, root / "export")
        return kept.lines, repr(model.load_report)
    finally:
        logger.removeHandler(kept)
        logger.setLevel(before)


def test_what_a_run_says(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    (lines, report), (others, _) = run_distributed(_run, 2, folder, tmp_path)
    patterns = (
        r"sharded LlamaForCausalLM: \d+ FSDP2 groups over 2 ranks, float32 parameters, computing in bfloat16",
        r".*/model: loaded \d+ tensors: .* read by all ranks",
        r"saved step 1 on 2 ranks in [\d.]+ s: .*/steps/step-1",
        r"resumed in [\d.]+ s from step 1, saved on 2 ranks: .*/steps/step-1",
        r"exported in [\d.]+ s: .*/export",
    )
    for pattern in patterns:
        assert sum(re.fullmatch(pattern + ".*", line) is not None for line in lines) == 1, (pattern, lines)
    assert others == [], "only rank 0 says it"
    assert report.startswith("<LoadReport: loaded ")
    assert len(report) < 400


def test_objects_print_as_a_person_would_want() -> None:
    assert repr(fs.ResumableSampler(64, seed=3)) == (
        "<ResumableSampler: num_rows 64, seed 3, shuffle 1; rank 0 of 1, epoch 0, position 0>"
    )
    packs = fs.PackedSampler([3] * 50, max_length=12)
    assert repr(packs).startswith("<PackedSampler: num_rows 50, max_length 12, seed 0")
    collator = fs.SFTCollator(ct.byte_tokenizer("chatml"), max_length=99)
    assert re.fullmatch(r"<SFTCollator: \w+, max_length 99, padding longest>", repr(collator))
    job = {"num_gpus": 8, "gpu": "h100", "seq_length": 4096, "global_batch_size": 64}
    plan = fs.plan_run(EXAMPLES / "data/qwen2.5-7b", **job)[0]
    shown = r"<RunPlan: 8 x h100, micro batch 2 x 4, none checkpointed, \S+ GiB \(\S+ left\), \S+ s a step>"
    assert re.fullmatch(shown, repr(plan))
