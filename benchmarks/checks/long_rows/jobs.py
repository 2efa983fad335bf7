"""A function on several gloo ranks, and the models and batches that it gets."""

import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

VOCABULARY = 128
Row = tuple[torch.Tensor, torch.Tensor]  # ids and labels
Gradients = dict[str, torch.Tensor]

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "use_cache": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Qwen3": ("Qwen3Config", {}),
    "Gemma3": ("Gemma3TextConfig", {"sliding_window": 8}),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 4,
        },
    ),
}


class AllFloat64(TorchFunctionMode):
    """Norms, softmaxes and losses of transformers compute in float32; while this is on, in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wide = args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if wide and func is torch.Tensor.float:
            return args[0]
        if wide:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if v is torch.float32 else v for name, v in kwargs.items()}
        return func(*args, **kwargs)


def small_model(family: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A tiny model of a family, in training, the same in every process."""
    import transformers as tf

    kind, own = FAMILIES[family]
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(
        getattr(tf, kind)(**{**_SMALL, **own, **fields}), dtype=torch.float32
    )
    # With weights as small as they begin, gradients hardly depend on what attention sees.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped_mm takes no float64
    return model.to(dtype).train()


def rows_of(lengths: Sequence[int], seed: int = 0, targets: int | None = None) -> list[Row]:
    """Random rows, of whose labels about 0.7 count; with ``targets``, that many in all."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    counts = [torch.rand(length, generator=generator) < 0.7 for length in lengths]
    for one in counts:
        one[0] = False  # nothing of its row is before it
    surplus = 0 if targets is None else int(sum(one.sum() for one in counts)) - targets
    if surplus < 0:
        raise ValueError(f"the rows have {surplus + targets} targets, and {targets} were asked for")
    for one in counts:
        places = one.nonzero().flatten()[: max(surplus, 0)]
        one[places] = False
        surplus -= len(places)
    return [(row, row.where(of, -100)) for row, of in zip(ids, counts, strict=True)]


def packed(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """The rows in one sequence, told apart by positions that begin anew."""
    positions = torch.cat([torch.arange(len(ids)) for ids, _ in rows])
    ids, labels = (torch.cat([row[index] for row in rows])[None] for index in (0, 1))
    return {"input_ids": ids, "labels": labels, "position_ids": positions[None]}


def each_alone(model: Any, rows: Sequence[Row]) -> tuple[float, Gradients]:
    """The mean over all targets, and its gradients: every row by itself through a plain model."""
    targets = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    total = 0.0
    for ids, labels in rows:
        logits = model(input_ids=ids[None]).logits[0, :-1]
        loss = F.cross_entropy(logits.float(), labels[1:], ignore_index=-100, reduction="sum") / targets
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def gradients_of(model: Any) -> Gradients:
    """Whole gradients by name; they are gone from the model afterwards."""
    from torch.distributed.tensor import DTensor

    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    model.zero_grad(set_to_none=True)
    return found


def largest_error(found: Gradients, expected: Gradients) -> float:
    """The largest error of a parameter's gradient over its largest entry, over all parameters."""
    return max(
        float((found[name].double() - of.double()).abs().max() / of.double().abs().max())
        for name, of in expected.items()
        if of.any()
    )


def norm_error(found: Gradients, expected: Gradients) -> float:
    """The norm of the error of all gradients over the norm of all."""
    error = sum(float((found[name].double() - of.double()).square().sum()) for name, of in expected.items())
    return (error / sum(float(of.double().square().sum()) for of in expected.values())) ** 0.5


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each of several processes, told of each other as by torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        job = (function, args, world_size, port, folder)
        mp.start_processes(_rank, job, nprocs=world_size, start_method="fork")
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(world_size)]


def _rank(
    rank: int, function: Callable[..., Any], args: tuple[Any, ...], world_size: int, port: int, folder: str
) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.save(function(*args), Path(folder) / str(rank))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
