"""The caller's loop over epochs: samplers, loaders, windows, and where it stands."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import fsdp_sft as fs
from tests.compositions import options
from tests.compositions.axes import Draw
from tests.compositions.rows import Row


class Loop:
    """The caller's loop over epochs: (epoch, window) without end, and where it stands."""

    def __init__(self, draw: Draw, rows: list[Row], mesh: Any) -> None:
        self.draw, self.rows = draw, rows
        shared = mesh is not None and "cp" in mesh.mesh_dim_names
        self.mesh: dict[str, Any] = {"mesh": mesh} if shared else {}
        each = 2 if shared else 1  # ranks that share rows
        self.ranks, self.rank = dist.get_world_size() // each, dist.get_rank() // each
        self.is_first = dist.get_rank() % each == 0
        self.epoch = self.taken = 0
        padded = draw["batches"] == "padded"
        self.collate = partial(options.collated if padded else _packed, draw)
        self.sampler: Any = None
        if draw["loader"] != "list":
            self.sampler = self._sampler() if padded else self._sampler_of_packs()
            self.loader = self._loader()

    def _loader(self) -> Any:
        workers = 2 if self.draw["loader"] == "sampler and workers" else 0
        options_of: dict[str, Any] = {"collate_fn": self.collate, "num_workers": workers}
        rows: Any = self.rows
        if self.draw["loader"] == "stream":
            return DataLoader(self.sampler, None, **options_of)
        if self.draw["batches"] != "padded":
            return DataLoader(rows, batch_sampler=self.sampler, **options_of)
        if self.draw["loader"] == "sampler of batches":
            return DataLoader([self.collate([row]) for row in rows], batch_size=None, sampler=self.sampler)
        return DataLoader(rows, options.BATCH_ROWS, sampler=self.sampler, **options_of)

    def _sampler(self) -> Any:
        mixed = self.draw["loader"] == "sampler of a mixture"
        return fs.ResumableSampler(self._halves() if mixed else len(self.rows), **self.mesh)

    def _sampler_of_packs(self) -> Any:
        given: dict[str, Any] = {"max_length": options.PACK_TOKENS, **self.mesh}
        if self.draw["loader"] == "stream":
            return fs.PackedStream(self.rows, buffer_size=9, **given)
        lengths, given["num_targets"] = fs.row_sizes(self.rows)
        if self.draw["loader"] == "sampler of a mixture":
            given["mixture"] = self._halves()
        if self.draw["loader"] == "sampler by cost":
            given["cost"] = (1.0, 0.5)
        return fs.PackedSampler(lengths, **given)

    def _halves(self) -> fs.Mixture:
        return fs.Mixture([len(self.rows) // 3, len(self.rows) - len(self.rows) // 3])

    def state(self) -> Any:
        """For the checkpoint; the same on all ranks."""
        if self.sampler is not None:
            return self.sampler.state_dict()
        return {"epoch": self.epoch, "taken": self.taken}

    def load(self, state: Any) -> None:
        """Go on from a state, at any number of ranks."""
        if self.sampler is not None:
            self.sampler.load_state_dict(state)
        else:
            self.epoch, self.taken = state["epoch"], state["taken"]

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        if self.sampler is None:
            yield from self._by_hand()
        while True:
            own = self.sampler.epoch
            for window in fs.windows(self.loader, options.micro_batches(self.draw), **self.mesh):
                if isinstance(self.sampler, fs.PackedStream):
                    own = self.sampler.epoch  # a stream finds out that it was at its end when it is read
                yield own, [self._twisted(batch) for batch in window]

    def _by_hand(self) -> Iterator[tuple[int, list[Any]]]:
        """Slices of the rows, dealt in turn; an epoch ends where a step would not be full."""
        each, size = options.micro_batches(self.draw) * self.ranks, options.BATCH_ROWS
        while True:
            if self.taken + each * size > len(self.rows):
                self.epoch, self.taken = self.epoch + 1, 0
            chosen = self.rows[self.taken : self.taken + each * size]
            self.taken += each * size
            parts = [chosen[place * size : (place + 1) * size] for place in range(each)]
            yield self.epoch, [self._twisted(self.collate(part)) for part in parts[self.rank :: self.ranks]]

    def _twisted(self, batch: Any) -> Any:
        if self.draw["twist"] == "keys differ" and self.rank == 0:
            return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])[None]}
        return batch


def _packed(draw: Draw, rows: list[Row]) -> Any:
    batch = fs.PackedCollator(max_length=options.PACK_TOKENS)(rows)
    if draw["loss terms"] == "weights":
        weights = [row.get("token_weights", [1.0] * len(row["input_ids"])) for row in rows]
        flat = torch.tensor([weight for of_row in weights for weight in of_row])
        batch["loss_weights"] = torch.ones(batch["labels"].shape)
        batch["loss_weights"][0, : len(flat)] = flat
    if draw["batches"] == "packed with a mask":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch
