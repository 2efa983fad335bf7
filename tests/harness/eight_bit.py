"""An optimizer with 8-bit state in a tensor subclass, as torchao's are, small enough to look through."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

BLOCK = 16


class Quantised(torch.Tensor):
    """Values in blocks of 16: a code for each, a scale for each block, and a table of what codes mean."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, kind: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=kind[0])

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, kind: Any) -> None:
        self.codes, self.scale, self.table, self.kind = codes, scale, table, kind

    @classmethod
    def zeros_like(cls, other: torch.Tensor) -> "Quantised":
        codes = torch.full_like(other, 128, dtype=torch.uint8)
        table = torch.linspace(-1, 1, 257, device=other.device)[:256]
        scale = torch.zeros(codes.numel() // BLOCK, device=other.device)
        return cls(codes, scale, table, [torch.float32, "signed"])

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale", "table"], self.kind

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"], inner["table"], context)

    def values_as_floats(self) -> torch.Tensor:
        blocks = self.table[self.codes.flatten().long()].view(-1, BLOCK) * self.scale[:, None]
        return blocks.view(self.codes.shape)

    def fill(self, values: torch.Tensor) -> None:
        blocks = values.reshape(-1, BLOCK)
        scale = blocks.abs().amax(1).clamp_min(1e-12)
        codes = torch.bucketize((blocks / scale[:, None]).contiguous(), self.table).clamp(max=255)
        self.codes.copy_(codes.view(self.codes.shape).to(torch.uint8))
        self.scale.copy_(scale)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self, aten = args[0], torch.ops.aten
        if function in (aten.detach.default, aten._to_copy.default):
            return cls(self.codes, self.scale, self.table, self.kind)
        if function is aten.view.default:
            return cls(self.codes.view(args[1]), self.scale, self.table, self.kind)
        if function is aten.slice.Tensor:
            start, end = args[2] or 0, min(args[3], len(self.codes))
            row = self.codes[0].numel()
            if start * row % BLOCK or end * row % BLOCK:
                raise ValueError("between the blocks only")
            scale = self.scale[start * row // BLOCK : end * row // BLOCK]
            return cls(self.codes[start:end], scale, self.table.clone(), self.kind)
        raise NotImplementedError(function)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Closed(Quantised):
    """One that does not say what is inside it."""

    __tensor_flatten__ = property()  # type: ignore[assignment]


class EightBitMomentum(torch.optim.Optimizer):
    """Momentum, kept in 8 bits where a rank's shard is made of whole blocks."""

    kind: Any = Quantised

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, local = self.state[parameter], own_of(parameter)
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["momentum"] = self._zeros(parameter)
                own, gradient = own_of(state["momentum"]), own_of(parameter.grad)
                state["step"] += 1
                if isinstance(own, Quantised):
                    own.fill(own.values_as_floats() * 0.9 + gradient)
                    local.add_(own.values_as_floats(), alpha=-group["lr"])
                else:
                    own.mul_(0.9).add_(gradient)
                    local.add_(own, alpha=-group["lr"])

    def _zeros(self, parameter: torch.Tensor) -> torch.Tensor:
        local = own_of(parameter)
        in_blocks = local.numel() > 0 and local.numel() % BLOCK == 0
        made = self.kind.zeros_like(local.detach()) if in_blocks else torch.zeros_like(local)
        if not isinstance(parameter, DTensor):
            return made
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(
            made, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )


class ClosedMomentum(EightBitMomentum):
    """With state that no checkpoint can hold."""

    kind = Closed


def own_of(tensor: torch.Tensor) -> Any:
    """What this rank has of a tensor: the very object."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def inner_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """This rank's state as plain tensors, what is inside subclasses in their place."""
    found = []
    for state in optimizer.state.values():
        plain = {}
        for name, value in state.items():
            local = own_of(value)
            if hasattr(type(local), "__tensor_flatten__") and type(local) is not torch.Tensor:
                names, context = local.__tensor_flatten__()
                plain.update({f"{name}/{n}": getattr(local, n).detach().clone() for n in names})
                plain[f"{name}/context"] = (type(local).__name__, context, tuple(local.shape), local.dtype)
            else:
                plain[name] = local.detach().clone()
        found.append(plain)
    return found
