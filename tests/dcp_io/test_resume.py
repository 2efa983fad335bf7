"""A run that goes on from a checkpoint has the losses of one that never stopped."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

import fsdp_sft as fs
from tests.harness.device import device_type, mesh_here
from tests.harness.models import VOCAB, full, tiny_model
from tests.harness.ranks import run_distributed

HSDP = {"dp_replicate": 2}
ROWS_PER_STEP = 24  # over 1, 2, 3 or 4 ranks and two micro-batches


def _rows() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(11)
    rows = []
    for _ in range(7 * ROWS_PER_STEP):
        ids = torch.randint(3, VOCAB, (10,), generator=draw)
        labels = ids.clone()
        labels[: int(torch.randint(6, (), generator=draw))] = -100
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return rows


class _Run:
    """Everything that a loop has, and its state."""

    def __init__(self, kind: str, mesh_shape: dict[str, int], dtype: torch.dtype, dropout: float) -> None:
        self.model = tiny_model("llama", seed=1, attention_dropout=dropout)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        mesh = mesh_here(**mesh_shape)
        fs.shard_model(self.model, mesh=mesh, mp_policy=policy)
        parameters = list(self.model.parameters())
        makers: dict[str, Any] = {
            "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-2),
            "fused": lambda: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        }
        self.optimizer = makers[kind]()
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=6)
        # Grows every second step, so that its own state decides what it does after a resume.
        self.scaler = (
            torch.amp.GradScaler(device_type(), init_scale=64.0, growth_interval=2) if kind == "sgd" else None
        )
        rows = _rows()
        self.sampler = fs.ResumableSampler(len(rows), seed=3)
        batch_size = ROWS_PER_STEP // 2 // torch.distributed.get_world_size()
        # A generator of its own: a loader draws its workers' seed whenever it begins, here from the numbers
        # that dropout on the CPU goes on with.
        self.loader = DataLoader(rows, batch_size, sampler=self.sampler, generator=torch.Generator())  # type: ignore[arg-type]
        torch.manual_seed(50 + torch.distributed.get_rank())

    def parts(self) -> dict[str, Any]:
        parts = {"scheduler": self.scheduler, "sampler": self.sampler, "scaler": self.scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def resume(self, path: str) -> int:
        loaded = fs.load_checkpoint(path, model=self.model, optimizer=self.optimizer)
        for name, part in self.parts().items():
            part.load_state_dict(loaded.train_state[name])
        return loaded.step

    def train(self, root: str, done: int, last: int, *, save_at: int | None = None) -> list[float]:
        losses = []
        self._save(root, done) if save_at == done else None
        for step, window in enumerate(fs.windows(self.loader, 2), start=done + 1):
            options = {"scheduler": self.scheduler, "scaler": self.scaler}
            losses.append(fs.train_step(self.model, window, self.optimizer, **options).loss)
            self._save(root, step) if step == save_at else None
            if step == last:
                break
        return losses

    def _save(self, root: str, step: int) -> None:
        state = {name: part.state_dict() for name, part in self.parts().items()}
        fs.save_checkpoint(root, step, model=self.model, optimizer=self.optimizer, train_state=state)

    def weights(self) -> list[torch.Tensor]:
        return [full(parameter).detach().clone() for parameter in self.model.parameters()]


def _same_ranks(root: str) -> None:
    for kind in ("adamw", "fused", "sgd"):
        dtype = torch.float32 if kind == "sgd" else torch.bfloat16
        never = _Run(kind, {}, dtype, dropout=0.2)
        expected = never.train("", 0, 6)
        stopped = _Run(kind, {}, dtype, dropout=0.2)
        assert stopped.train(f"{root}/{kind}", 0, 4, save_at=3) == expected[:4]
        resumed = _Run(kind, {}, dtype, dropout=0.2)
        assert resumed.resume(f"{root}/{kind}") == 3
        assert resumed.train("", 3, 6) == expected[3:], kind
        assert all(torch.equal(a, b) for a, b in zip(resumed.weights(), never.weights(), strict=True))
        assert len(set(expected)) == 6
        if resumed.scaler is not None:
            assert resumed.scaler.get_scale() == 64.0 * 2**3
        at_zero = _Run(kind, {}, dtype, dropout=0.2)
        assert at_zero.train(f"{root}/{kind}-0", 0, 6, save_at=0) == expected, "saving a fresh optimizer"
        assert all(torch.equal(a, b) for a, b in zip(at_zero.weights(), never.weights(), strict=True))


def test_bit_for_bit_at_the_same_number_of_ranks(tmp_path: Path) -> None:
    run_distributed(_same_ranks, 2, str(tmp_path))
