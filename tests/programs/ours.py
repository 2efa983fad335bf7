"""A program as its user writes it with the library; runs on every rank."""

import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

import fsdp_sft as fs
from tests.harness.device import device_here, mesh_here
from tests.harness.models import full
from tests.programs.rows import BATCH_ROWS, PROMPT, collated, held_out, names_of, rows_for
from tests.programs.user import PlantedError, User
from tests.programs.writing import OF_THE_FORWARD, Program, Step

Told = tuple[str, Any]  # ("value", it) or (the name of an error, its message)


def run(program: Program, folder: Path) -> tuple[list[Told], list[Any], dict[str, torch.Tensor]]:
    """All steps on this rank.

    Returns:
        What each step gave, the rows of each window that was taken, and the parameters at the end.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = Ours(program, folder)
        told: list[Told] = []
        for index, step in enumerate(program.steps):
            odd = program.odd is not None and dist.get_rank() == program.ranks - 1 and index == program.odd[0]
            told.append(ours.told(step, program.odd[1] if odd and program.odd is not None else ""))
            if program.odd is not None and index >= program.odd[0] and told[-1][0] != "value":
                break  # from here on nothing is promised
    whole = {}
    if program.odd is None:  # gathering is collective
        whole = {name: full(p).detach().cpu().clone() for name, p in ours.model.named_parameters()}
    return told, ours.windows, whole


class Ours(User):
    """The user's code, and the calls of the library."""

    def __init__(self, program: Program, folder: Path) -> None:
        super().__init__(program)
        self.folder, self.saved = folder, 0
        settings = program.settings
        if settings["at first"] != "nothing":
            self.toggle(settings["at first"])
        if settings["sac"] != "0":
            ratio, _, offloaded = settings["sac"].partition(" ")
            fs.apply_sac(self.model, ratio, offload=bool(offloaded))
        if settings["model"] == "mixtral":
            fs.watch_experts(self.model)
        mesh = None if program.ranks == 1 else self._mesh()
        if mesh is not None:
            manner = {} if settings["shards"] == "freed" else {"reshard_after_forward": False}
            fs.shard_model(self.model, mesh=mesh, mp_policy=MixedPrecisionPolicy(), **manner)
        self.model.to(device_here())
        with suppress(fs.ModelLossError):
            self._prepare()
        self.optimizer = self.made_optimizer()
        rows = rows_for(program)
        self.sampler = fs.ResumableSampler(rows)
        self.loader: Any = DataLoader(
            rows,  # type: ignore[arg-type]
            BATCH_ROWS,
            sampler=self.sampler,
            collate_fn=partial(collated, program),
        )
        own = dist.get_rank() if program.ranks > 1 else 0
        self.held_out = held_out(program)[own :: program.ranks]
        self.windows: list[Any] = []
        self.coming = self._windows()

    def _mesh(self) -> Any:
        replicas = self.program.settings["mesh"] == "replicas 2"
        return mesh_here(dp_replicate=2, dp_shard=1) if replicas else mesh_here()

    def _windows(self) -> Iterator[list[Any]]:
        while True:
            yield from fs.windows(self.loader, int(self.program.settings["window"]))

    def told(self, step: Step, odd: str) -> Told:
        """What a step gives, or the error that it ends with."""
        name, *args = step
        try:
            if odd:
                return "value", self._odd(odd, args)
            return "value", getattr(self, "_" + name.replace(" ", "_"))(*args)
        except (fs.FsdpSftError, PlantedError) as error:
            return type(error).__name__, str(error)

    def _taken(self) -> list[Any]:
        window = next(self.coming)
        self.windows.append([names_of(batch) for batch in window])
        self.batches = window
        return window

    def _train(self, loss: str = "own", **options: Any) -> Any:
        window = self._taken()
        self.coefficient += 0.25
        result = fs.train_step(
            self.model,
            window,
            self.optimizer,
            loss_fn=self.loss_fn(loss),
            **options,
        )
        load = None if result.expert_load is None else [sum(layer) for layer in result.expert_load.counts]
        return result.loss, result.grad_norm, result.num_targets, result.num_tokens, load

    def _evaluate(self, loss: str) -> Any:
        result = fs.evaluate(self.model, self.held_out, loss_fn=self.loss_fn(loss))
        return result.loss, result.num_targets

    def _generate(self) -> Any:
        return self.say(PROMPT.to(device_here()))

    def _toggle(self, name: str) -> None:
        self.toggle(name)
        if name in OF_THE_FORWARD:
            with suppress(fs.ModelLossError):
                self._prepare()

    def _save(self) -> None:
        fs.save_checkpoint(
            self.folder / "steps",
            self.saved + 1,
            model=self.model,
            optimizer=self.optimizer,
            train_state={"sampler": self.sampler.state_dict()},
        )
        self.saved += 1

    def _load(self, which: int) -> None:
        if not self.saved:
            return
        saved = fs.find_checkpoints(self.folder / "steps")[which % self.saved]
        state = fs.load_checkpoint(saved.path, model=self.model, optimizer=self.optimizer)
        self.sampler.load_state_dict(state.train_state["sampler"])
        self.coming = self._windows()

    def _fail(self, way: str, layer: int, place: int) -> None:
        """A step in which the user's own code raises, in a micro-batch of the window."""
        place = min(place, int(self.program.settings["window"]) - 1)
        if way == "loss_fn":
            self.place = place
            fs.train_step(self.model, self._taken(), self.optimizer, loss_fn=self._failing)
            return
        bomb = self.bombs[layer]
        bomb.way, bomb.left = way, place
        try:
            self._train()
        finally:
            bomb.way = ""

    def _failing(self, model: Any, batch: Any) -> torch.Tensor:
        self.place -= 1
        if self.place < 0:
            raise PlantedError("in the user's loss")
        return self.loss_fn("sum")(model, batch)  # type: ignore[no-any-return]

    def _rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _prepare(self) -> None:
        fs.prepare_loss(self.model, impl=self.program.settings["loss"])  # type: ignore[arg-type]

    def _odd(self, what: str, args: Any) -> Any:
        """What this rank alone does, at a step that trains on the others."""
        if what == "leaves a step out":
            return None
        if what == "evaluates":
            return self._evaluate("own")
        if what == "saves":
            return self._save()
        if what == "another rate":
            self._rate(0.5)
        if what == "another layer frozen":
            self.freeze(1)
        if what == "one batch less":
            self._taken()
            return fs.train_step(self.model, self.batches[:-1], self.optimizer)
        if what == "another loss":
            return self._train("sum" if args[0] == "own" else "own")
        return self._train(*args, **({"max_grad_norm": 0.5} if what == "another clip" else {}))
