"""What others say of rows that ranks share: the messages, from running them on 2 gloo ranks.

accelerate turns FSDP2 on for accelerators only. Here its state is told after its own start that the plugin is
on, as in ``benchmarks.speed.peers``; nothing else of it is changed.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.checks.long_rows.jobs import packed, rows_of, small_model


def message_of(name: str) -> str:
    """What one of ``CASES`` raises."""
    try:
        CASES[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def package_of(name: str) -> str:
    """The package that one of ``CASES`` is about."""
    first = name.split(",")[0]
    return {"Trainer": "transformers", "TRL": "trl"}.get(first, first)


def _told_of_fsdp2(**sizes: int) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    state = Accelerator(cpu=True).state
    state.fsdp_plugin, state.parallelism_config = plugin, ParallelismConfig(**sizes)
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


def _accelerator(**sizes: int) -> Any:
    from accelerate import Accelerator, ParallelismConfig

    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))


def _prepared(family: str) -> None:
    from accelerate import Accelerator

    _told_of_fsdp2(cp_size=2)
    model = small_model(family)
    Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))


def _stepped() -> None:
    from accelerate import Accelerator

    _told_of_fsdp2(cp_size=2)
    accelerator, model = Accelerator(cpu=True), small_model("Llama")
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    batch = packed(rows_of([16]))
    with accelerator.maybe_context_parallel(
        buffers=list(batch.values()), buffer_seq_dims=[1] * len(batch), no_restore_buffers=set(batch.values())
    ):
        model(**batch)


def _trained(family: str, attention: str, kind: str, **sizes: int) -> None:
    from accelerate import ParallelismConfig
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    rows = [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in rows_of([16] * 8)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, **_OPTIONS, parallelism_config=ParallelismConfig(**sizes)
        )
        assert arguments.device.type == "cpu"  # asking for it makes accelerate's state anew
        if "cp_size" in sizes:
            _told_of_fsdp2(**sizes)
        model = small_model(family)
        model.set_attn_implementation(attention)
        collate: Any = {"packs": DataCollatorWithFlattening(), "padded": _padded}[kind]
        Trainer(model, arguments, train_dataset=rows, data_collator=collate).train()  # type: ignore[arg-type]


def _padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    mask = torch.ones_like(batch["input_ids"])
    mask[:, -3:] = 0
    return {**batch, "attention_mask": mask}


_OPTIONS: dict[str, Any] = {
    "use_cpu": True,
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def _sft(**options: Any) -> None:
    from accelerate import ParallelismConfig
    from trl import SFTConfig, SFTTrainer

    from benchmarks.speed.peers import as_dataset
    from examples.tiny_model import make_tokenizer

    rows = [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in rows_of([16] * 8)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            **_OPTIONS,
            bf16=False,
            max_length=32,
            **options,
            parallelism_config=ParallelismConfig(cp_size=2),
        )
        assert arguments.device.type == "cpu"
        _told_of_fsdp2(cp_size=2)
        SFTTrainer(
            small_model("Llama"),
            arguments,
            train_dataset=as_dataset(rows),
            processing_class=make_tokenizer(["a few words"]),
        ).train()


def _torch_alone() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    tokens = torch.randn(1, 4, 16, 8)
    with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[2], no_restore_buffers={tokens}):
        query = tokens.clone().requires_grad_()
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()


CASES: dict[str, Callable[[], None]] = {
    "torch, `context_parallel`": _torch_alone,
    "accelerate, `cp_size=2` without FSDP2": lambda: _accelerator(cp_size=2) and None,
    "accelerate, `cp_size=2`, a model with sliding windows": lambda: _prepared("Gemma3"),
    "accelerate, `cp_size=2`, a step of Llama": _stepped,
    "accelerate, `sp_size=2` without DeepSpeed": lambda: _accelerator(sp_size=2) and None,
    "Trainer, `cp_size=2`, eager attention": lambda: _trained("Llama", "eager", "packs", cp_size=2),
    "Trainer, `cp_size=2`, a mask of padding": lambda: _trained("Llama", "sdpa", "padded", cp_size=2),
    "Trainer, `cp_size=2`, packs of DataCollatorWithFlattening": lambda: _trained(
        "Llama", "sdpa", "packs", cp_size=2
    ),
    "Trainer, `sp_size=2` without DeepSpeed": lambda: _trained("Llama", "sdpa", "padded", sp_size=2),
    "TRL, `SFTConfig(packing=True)`, `cp_size=2`": lambda: _sft(packing=True),
    "TRL, without packing, `cp_size=2`": lambda: _sft(),
}
