"""transformers' Trainer and TRL's SFTTrainer on a simulated accelerator, for benchmarks.checks.host_syncs.

accelerate and Trainer know accelerators by their names and cannot be given another. So their answers to
"which device, which backend, can it do bf16" are replaced here, and they take the simulated device for a GPU;
nothing else of them is changed. FSDP2 is asked for as their documentation says.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch

from benchmarks.checks.simulated import Counted

NAMES = {"transformers.Trainer": ["accelerate"], "trl.SFTTrainer": ["trl", "datasets"]}
FSDP2 = {
    "fsdp_version": 2,
    "reshard_after_forward": True,
    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
}


def missing(name: str) -> str | None:
    """The first package that a row needs and that is not installed."""
    return next((package for package in NAMES[name] if find_spec(package) is None), None)


@contextmanager
def taken_for_a_gpu() -> Iterator[None]:
    """Let accelerate use this process's simulated device."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    index = int(os.environ["LOCAL_RANK"])
    device = torch.device("sim", index)

    def set_device(state: Any) -> None:
        state.device = device

    with ExitStack() as replaced:
        for name, value in {
            "default_device": device,
            "_prepare_backend": lambda *_, **__: (torch.distributed.get_backend(), DistributedType.MULTI_GPU),
            "set_device": set_device,
        }.items():
            replaced.enter_context(mock.patch.object(PartialState, name, value))
        replaced.enter_context(
            mock.patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True)
        )
        yield


def count(name: str, model: Any, rows: list[dict[str, Any]], micro_batches: int, step: int) -> Counted:
    """What the host waited for in one step of a Trainer, from its beginning to that of the next."""
    from transformers import TrainerCallback

    counted = Counted()

    class Steps(TrainerCallback):
        def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == step:
                counted.start()
            elif state.global_step == step + 1:
                counted.stop()

    with tempfile.TemporaryDirectory() as folder, taken_for_a_gpu():
        options = {
            "output_dir": folder,
            "max_steps": step + 2,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": micro_batches,
            "bf16": True,
            "fsdp": True,
            "fsdp_config": FSDP2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        trainer = _trainer(name, model, rows, options, Steps())
        trainer.train()
    return counted


def _trainer(name: str, model: Any, rows: list[dict[str, Any]], options: dict[str, Any], steps: Any) -> Any:
    if name == "transformers.Trainer":
        from transformers import Trainer, TrainingArguments

        return Trainer(model, TrainingArguments(**options), train_dataset=rows, callbacks=[steps])  # type: ignore[arg-type]
    from trl import SFTConfig, SFTTrainer

    from benchmarks.speed.peers import as_dataset
    from examples.tiny_model import make_tokenizer

    return SFTTrainer(
        model,
        SFTConfig(**options),
        train_dataset=as_dataset(rows),
        processing_class=make_tokenizer(["a few words"]),
        callbacks=[steps],
    )
