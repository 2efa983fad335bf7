"""What a user writes with torch, transformers and peft alone: the same beside either training."""

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from tests.harness.models import tiny_model
from tests.programs.writing import LAYERS, Program

RATE = 0.02


class PlantedError(Exception):
    """Raised by the program's own code."""


def built(program: Program) -> Any:
    """The model before anything is done to it."""
    kind = program.settings["model"]
    families = {"tied": "qwen2-tied", "lora": "llama"}
    model = tiny_model(families.get(kind, kind), seed=program.seed, num_hidden_layers=LAYERS)
    if kind != "lora":
        return model
    import peft

    torch.manual_seed(program.seed)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(program.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # also what peft begins with zeros, of which nothing could be seen
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.train()


class Bomb:
    """A hook that is there from the start, and raises in a forward or backward that trains when it is lit."""

    def __init__(self) -> None:
        self.way, self.left = "", 0

    def __call__(self, module: Any, args: Any, output: torch.Tensor) -> None:
        if not self.way or not torch.is_grad_enabled() or not output.requires_grad:
            return
        self.left -= 1
        if self.left >= 0:
            return
        if self.way == "backward":
            output.register_hook(_explode)
        else:
            self.way = ""
            raise PlantedError("in a block's forward")


def _explode(gradient: torch.Tensor) -> None:
    raise PlantedError("in a block's backward")


class User:
    """A program's own code: a model and what it does to it between the calls of the training.

    Attributes:
        model: As the program has it.
        on: Toggles that are on.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.model = built(program)
        self.trainable = {name for name, p in self.model.named_parameters() if p.requires_grad}
        base = self.base
        self.layers, self.head = list(base.model.layers), base.lm_head
        self.bombs = [Bomb() for _ in self.layers]
        for layer, bomb in zip(self.layers, self.bombs, strict=True):
            layer.mlp.register_forward_hook(bomb)
        self.on: dict[str, Any] = {}
        self.coefficient = 1.0

    @property
    def base(self) -> Any:
        """The model of transformers."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def made_optimizer(self) -> torch.optim.Optimizer:
        """Of all that is ever trained, frozen now or not."""
        parameters = [p for name, p in self.model.named_parameters() if name in self.trainable]
        if self.program.settings["optimizer"] == "sgd":
            return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)
        # A large eps: without, a gradient of 1e-9 moves a weight as far as one of 1.
        return torch.optim.AdamW(parameters, lr=RATE, eps=1e-3)

    def toggle(self, name: str) -> None:
        """Put something on the model, or take it off."""
        if name in self.on:
            self.on.pop(name)()
        else:
            self.on[name] = getattr(self, "_" + name.replace(" ", "_"))()

    def _hook_on_a_block(self) -> Any:
        return self.layers[1].register_forward_hook(lambda module, args, output: output * 0.9).remove

    def _hook_on_the_head(self) -> Any:
        return self.head.register_forward_hook(lambda module, args, output: output * 0.8).remove

    def _wrapped_head(self) -> Any:
        forward = self.head.forward
        self.head.forward = lambda hidden: 0.7 * forward(hidden)
        return partial(delattr, self.head, "forward")

    def _wrapped_model(self) -> Any:
        base, forward = self.base, self.base.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            output.logits = output.logits * 0.6
            return output

        base.forward = wrapped
        return partial(delattr, base, "forward")

    def _another_loss_of_the_model(self) -> Any:
        base, own = self.base, self.base.loss_function
        base.loss_function = lambda *args, **kwargs: 2 * own(*args, **kwargs)
        return partial(setattr, base, "loss_function", own)

    def _frozen_layer(self) -> Any:
        return self.freeze(0)

    def freeze(self, index: int) -> Any:
        """Freeze a layer; the function that undoes it."""
        self._set_trained(index, False)
        return lambda: self._set_trained(index, True)

    def _set_trained(self, index: int, trained: bool) -> None:
        for name, parameter in self.model.named_parameters():
            if name in self.trainable and f"layers.{index}." in name:
                parameter.requires_grad_(trained)

    def _hook_on_a_weight(self) -> Any:
        own = [
            p
            for n, p in self.model.named_parameters()
            if n in self.trainable and f"layers.{LAYERS - 1}." in n
        ]
        return own[0].register_hook(lambda gradient: gradient * 0.5).remove

    def _merged(self) -> Any:
        self.model.merge_adapter()
        return self.model.unmerge_adapter

    def loss_fn(self, name: str) -> Any:
        """A loss of the user's own, by its name; None for that of the library."""
        if name == "own":
            return None
        return {"sum": _sum, "coefficient": self._scaled}[name]

    def _scaled(self, model: Any, batch: Any) -> torch.Tensor:
        return self.coefficient * _sum(model, batch)

    def say(self, ids: torch.Tensor) -> list[list[int]]:
        """The likeliest next tokens."""
        self.model.eval()
        found = self.model.generate(
            input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        self.model.train()
        return found.tolist()  # type: ignore[no-any-return]


def _sum(model: Any, batch: Any) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum", label_smoothing=0.1)
