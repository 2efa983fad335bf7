"""What callers meet at a public function: answers to words of other libraries, errors without our frames."""

import functools
import inspect
import sys
from collections.abc import Callable, Collection
from difflib import get_close_matches
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from fsdp_sft.errors import FsdpSftError

P = ParamSpec("P")
R = TypeVar("R")

# Keywords and names of the package, as other libraries call them: what to write here.
_HERE = {
    "Trainer SFTTrainer TrainingArguments SFTConfig Accelerator train": (
        "the loop is yours: windows() and train_step(), as the README shows"
    ),
    "gradient_accumulation_steps accumulation_steps grad_accum": (
        "it is called grad_accum_steps, of windows()"
    ),
    "per_device_train_batch_size train_batch_size batch_size": (
        "the DataLoader has the rows of a micro-batch, and windows(loader, grad_accum_steps=) their number"
    ),
    "max_seq_length max_seq_len seq_len model_max_length": (
        "it is called max_length, of SFTCollator, PackedCollator, filter_rows and encode_dataset"
    ),
    "torch_dtype bf16 fp16 mixed_precision": (
        "parameters are float32 shards, and the forward's dtype is bfloat16, or that of "
        "shard_model(mp_policy=MixedPrecisionPolicy(param_dtype=...))"
    ),
    "device_map low_cpu_mem_usage max_memory": (
        "init_distributed chooses each rank's device, and each rank holds its shard, by mesh="
    ),
    "load_in_4bit load_in_8bit quantization_config": (
        "quantised folders load by themselves, and frozen_dtype='nf4' or 'fp8' packs a base for adapters"
    ),
    "num_labels id2label problem_type": (
        "it is a field of the config: build_meta_model(path, architectures=[...], num_labels=...), "
        "shard_model, load_weights(missing='initialise')"
    ),
    "completion_only_loss assistant_only_loss response_template train_on_inputs": (
        "exactly the assistant's tokens are trained; train_on= of SFTCollator chooses other turns"
    ),
    "learning_rate lr weight_decay optim lr_scheduler_type": (
        "the optimizer is yours: torch.optim.AdamW(model.parameters(), lr=...)"
    ),
    "save_total_limit keep_last_n max_to_keep": "it is called keep_last, of save_checkpoint",
    "gradient_checkpointing activation_checkpointing use_reentrant": (
        "apply_sac(model, ratio) recomputes activations, of a fraction of the blocks"
    ),
    "packing": "PackedSampler and PackedCollator make packs",
    "resume_from_checkpoint": "call load_checkpoint before the first step",
    "output_dir": "save_checkpoint(root, step, ...) and export_hf(model, folder) take a folder",
}
WORDS = {word: text for words, text in _HERE.items() for word in words.split()}


def answer(word: str, known: Collection[str]) -> str:
    """What to write in place of a word that is none of ``known``; empty if nothing is like it."""
    near = get_close_matches(word, known, 1)
    return WORDS.get(word) or (f"do you mean {near[0]}?" if near else "")


def answered(owner: ModuleType, name: str) -> Any:
    """A public name of the module that owns it; a keyword that it does not take is answered.

    Functions, and classes made by an ``__init__`` of their own, raise a TypeError that says what to write.
    Errors that are for users end at the caller's line; with ``python -X dev`` they have all frames.
    """
    found = getattr(owner, name)
    holder, attribute = (found, "__init__") if inspect.isclass(found) else (owner, name)
    function = vars(holder).get(attribute)
    if inspect.isfunction(function):
        setattr(holder, attribute, _answering(function))  # of a module, where pickle looks for it
    return getattr(owner, name)


def _answering(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose unknown keywords are answered."""
    known = inspect.signature(function).parameters
    checks_itself = any(one.kind is one.VAR_KEYWORD for one in known.values())

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for word in set() if checks_itself else kwargs.keys() - known.keys():
            if here := answer(word, known):
                raise TypeError(f"{function.__qualname__.removesuffix('.__init__')} takes no {word}=: {here}")
        try:
            return function(*args, **kwargs)
        except FsdpSftError as error:
            if not sys.flags.dev_mode:
                error.__traceback__ = None
            raise

    return called
