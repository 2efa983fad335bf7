"""What a rank stores for its backward, and what it sends around attention."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_sft as fs
from benchmarks.checks.long_rows.jobs import packed, rows_of, small_model

LAYERS, HEADS, HEAD_SIZE = 3, 8, 16
HIDDEN = HEADS * HEAD_SIZE
LENGTHS = [200, 30, 118, 164]
TOKENS = sum(LENGTHS)


@dataclass(frozen=True)
class Case:
    """A model and how it runs.

    Attributes:
        attention: ``"sdpa"`` or ``"varlen"``.
        key_heads: Of the model.
        sac: What ``apply_sac`` gets.
    """

    attention: str
    key_heads: int = HEADS
    sac: str = "0"


@dataclass(frozen=True)
class Counts:
    """Of one rank in one step.

    Attributes:
        stored: Bytes that the forward keeps, by kind.
        sent: Calls, and elements handed in, of exchanges in the forward and in the backward.
    """

    stored: Counter[str]
    sent: dict[str, tuple[int, int]]


def measured(cp: int, cases: list[Case]) -> list[Counts]:
    """Of this rank, one step over a pack for each case."""
    fs.init_distributed(device_type="cpu")
    mesh = fs.build_mesh(cp=cp, device_type="cpu")
    return [_measured(mesh, case) for case in cases]


def _measured(mesh: Any, case: Case) -> Counts:
    model = small_model(
        "Llama",
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=case.key_heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=TOKENS,
    )
    if case.sac != "0":
        fs.apply_sac(model, case.sac)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fs.shard_model(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if case.attention == "varlen":
        fs.use_varlen_attention(model)
    fs.use_context_parallel(model, mesh=mesh)
    batch = packed(rows_of(LENGTHS))
    num_targets = fs.count_targets([batch], mesh=mesh)
    stored, exchanges = Stored(), Exchanges()
    with exchanges, torch.autograd.graph.saved_tensors_hooks(stored.pack, lambda tensor: tensor):
        loss = fs.causal_lm_loss(model, batch, num_targets=num_targets)
    forward = exchanges.taken()
    bytes_by_kind = stored.by_kind(_parameters_of(model))
    with exchanges:
        loss.backward()
    return Counts(bytes_by_kind, {"forward": forward, "backward": exchanges.taken()})


def _parameters_of(model: Any) -> set[int]:
    """The storages of all parameters, gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    return {parameter.untyped_storage()._cdata for parameter in model.parameters()}


class Stored:
    """The storages that a forward keeps for its backward."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """For ``saved_tensors_hooks``."""
        # Tensors that are kept keep their storages, so no two of them have the same address.
        self.tensors.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    def by_kind(self, parameters: set[int]) -> Counter[str]:
        """Bytes, those of parameters' storages apart."""
        found: Counter[str] = Counter()
        for key, tensor in self.tensors.items():
            if key not in parameters:
                found[_kind_of(tensor)] += tensor.untyped_storage().nbytes()
        return found


def _kind_of(tensor: torch.Tensor) -> str:
    if tensor.ndim == 4 and tensor.shape[-2:] == (TOKENS, TOKENS):
        return "mask"
    return "activations" if tensor.is_floating_point() else "ids"


class Exchanges(TorchDispatchMode):
    """Counts what this rank hands to ``all_to_all_single``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            self.calls += 1
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))

    def taken(self) -> tuple[int, int]:
        """Calls and elements since the last time."""
        found = self.calls, self.elements
        self.calls = self.elements = 0
        return found


def by_formula(cp: int, case: Case) -> int:
    """Elements that a rank hands in for a layer's forward, 1/cp of which stay on the rank."""
    from fsdp_sft.attention.context_parallel.group import key_heads

    keys = case.key_heads * key_heads(HEADS, case.key_heads, cp).repeats
    return (HEADS + 2 * keys + HEADS) * HEAD_SIZE * TOKENS // cp
