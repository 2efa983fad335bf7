"""What nearly every rank of a test imports: the fork server has it, so that ranks need not import it each.

Imports alone, which start no thread: a process with threads must not be forked.
"""

import gc
import importlib
import pkgutil
import threading

import fsdp_sft

_FAMILIES = ("gemma2", "gemma3", "gpt2", "gpt_oss", "lfm2", "llama", "mixtral", "qwen2", "qwen3", "t5")

for name in (
    "peft",
    "pytest",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.generation.utils",
    *(f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES),
    *(module.name for module in pkgutil.walk_packages(fsdp_sft.__path__, "fsdp_sft.")),
    "tests.harness.models",
    "tests.harness.ranks",
):
    if not name.endswith("__main__"):
        importlib.import_module(name)
assert threading.active_count() == 1
gc.collect()
gc.freeze()  # else the first collection in each fork writes to, and so copies, every page of what is here
