"""The same program in one process and plain PyTorch, and which of its steps the library has to refuse."""

import copy
from typing import Any

import torch
import torch.nn.functional as F

from tests import plain
from tests.programs.rows import BATCH_ROWS, NUM_ROWS, PROMPT, collated, held_out, rows_for
from tests.programs.user import User
from tests.programs.writing import Program, Step


class Plain(User):
    """The plain loop.

    Args:
        program: To be followed.
        windows: The rows of each window that the library's side took, of all ranks.
    """

    def __init__(self, program: Program, windows: list[list[Any]]) -> None:
        super().__init__(program)
        self.is_sharded = program.ranks > 1
        if program.settings["at first"] != "nothing":
            self.toggle(program.settings["at first"])
        self.optimizer = self.made_optimizer()
        self.rows = {(row["input_ids"][0], row["input_ids"][1]): row for row in rows_for(program)}
        self.held_out = held_out(program)
        self.windows = windows
        self.epoch = self.taken = 0
        self.seen: dict[tuple[int, int], Any] = {}
        self.saves: list[Any] = []

    # -- what is refused

    def refusals(self, step: Step) -> tuple[str, ...]:
        """Names of the errors, of which the first met is raised, that the library has to end a step with."""
        name, *args = step
        merged = ("UnsupportedModelError",) if "merged" in self.on else ()
        if name == "save" or (name == "load" and self.saves):
            return merged
        if name == "evaluate":
            return self._of_loss(args[0])
        if name == "fail":
            loss = "sum" if args[0] == "loss_fn" else "own"
            return (*merged, *self._of_hooks(), *self._of_loss(loss), "PlantedError")
        if name == "train":
            return (*merged, *self._of_hooks(), *self._of_loss(args[0]))
        return ()

    def _of_hooks(self) -> tuple[str, ...]:
        hooked = self.is_sharded and "hook on a weight" in self.on
        return ("UnsupportedModelError",) if hooked else ()

    def _of_loss(self, loss: str) -> tuple[str, ...]:
        differs = "wrapped model" in self.on or "another loss of the model" in self.on
        return ("ModelLossError",) if loss == "own" and differs else ()

    # -- what it computes

    def perform(self, step: Step) -> Any:
        """Do a step that is not refused, and return what the library has to return."""
        name, *args = step
        return getattr(self, "_" + name.replace(" ", "_"))(*args)

    def refuse(self, step: Step) -> None:
        """What a refused step does all the same: its window was taken."""
        if step[0] in ("train", "fail"):
            self.coefficient += 0.25 if step[0] != "fail" or step[1] != "loss_fn" else 0
            self._window()

    def _window(self) -> list[Any]:
        each = self.windows.pop(0)
        place = (self.epoch, self.taken)
        rows = sorted(row for window in each for batch in window for row in batch)
        before = self.seen.setdefault(place, rows)
        assert before == rows, f"at {place} other rows than when it was there before: {rows}, then {before}"
        others = [row for at, seen in self.seen.items() if at[0] == place[0] and at != place for row in seen]
        assert not set(rows) & set(others), f"rows twice in epoch {place[0]}: {set(rows) & set(others)}"
        self.taken += len(rows)
        assert len(rows) == BATCH_ROWS * self.program.ranks * int(self.program.settings["window"])
        if self.taken == NUM_ROWS:
            self.epoch, self.taken = self.epoch + 1, 0
        return [
            collated(self.program, [self.rows[name] for name in batch]) for window in each for batch in window
        ]

    def _train(self, loss: str = "own") -> Any:
        self.coefficient += 0.25
        window = self._window()
        targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
        tokens = sum(int((batch["attention_mask"] != 0).sum()) for batch in window)
        losses = (self._summed(loss, batch) / targets for batch in window)
        total, norm = plain.step(self.model, losses, [self.optimizer], max_norm=1.0)
        load = None
        if self.program.settings["model"] == "mixtral":
            load = [2 * tokens for _ in self.layers]
        return total, norm, targets, tokens, load

    def _summed(self, loss: str, batch: Any) -> torch.Tensor:
        if loss != "own":
            return self.loss_fn(loss)(self.model, batch)  # type: ignore[no-any-return]
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = self.model(**inputs, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")

    def _evaluate(self, loss: str) -> Any:
        self.model.eval()
        with torch.no_grad():
            total = sum(float(self._summed(loss, batch)) for batch in self.held_out)
        self.model.train()
        targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in self.held_out)
        return total / targets, targets

    def _generate(self) -> Any:
        return self.say(PROMPT)

    def _toggle(self, name: str) -> None:
        self.toggle(name)

    def _save(self) -> None:
        state = self.model.state_dict(), self.optimizer.state_dict()
        self.saves.append((copy.deepcopy(state), self.epoch, self.taken))

    def _load(self, which: int) -> None:
        if not self.saves:
            return
        (model, optimizer), self.epoch, self.taken = self.saves[which % len(self.saves)]
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))

    def _rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}
