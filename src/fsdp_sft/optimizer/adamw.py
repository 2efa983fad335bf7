"""AdamW that keeps parameters and states in bfloat16 and rounds them stochastically."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from fsdp_sft._tensors.boxes import Box, box_of, local_of

CHUNK = 1 << 22  # most elements of a shard that are in float32 at a time
_STATES = ("exp_avg", "exp_avg_sq")
_DTYPES = {torch.bfloat16, torch.float32, torch.float64}
_BITS = 1 << 64
# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW for bfloat16 parameters: computed in float32 and rounded to bfloat16 stochastically.

    Rounding to the nearest loses an update that is below 1/512 of a bfloat16 parameter, as most updates are
    in fine-tuning. Stochastic rounding goes up or down with probabilities that make the mean right, so small
    updates arrive on average, and float32 masters are not needed. Parameters of float32 or float64 are
    updated as by ``torch.optim.AdamW``, bit for bit on a CPU.

    The random bits of an element are computed from the seed, the number of steps that its parameter has made,
    the parameter's place in the optimizer and the element's place in the **whole** parameter. Therefore
    replicas round alike, no two elements share bits, and a run that is resumed from a checkpoint rounds as it
    would have without the interruption, on any number of ranks. No random number generator is used or
    advanced.

    Args:
        params: Parameters, or groups of parameters, of bfloat16, float32 or float64; dtypes may be mixed.
        lr: Learning rate, >= 0: a number or a tensor of one element. It is read once a step; if the tensor is
            on a device, the host waits for it.
        betas: Decay rates of the two moments, in [0, 1).
        eps: Term added to the denominator, >= 0.
        weight_decay: Decoupled weight decay, >= 0, as in ``torch.optim.AdamW``.
        seed: Seed of the rounding, an integer that must be **the same on all ranks**; ``train_step`` checks
            that it is.
        state_dtype: Dtype of the two moments: ``torch.bfloat16``, rounded stochastically too, or
            ``torch.float32``. None takes each parameter's own dtype.

    Raises:
        ValueError: If a value is out of range; at the first step of a parameter, if it or its moments have
            another dtype, such as float16, whose range is too small for second moments.

    Collective: none.
    Memory: A parameter and its two moments take 6 bytes with bfloat16 masters, and 10 with float32 moments;
        float32 masters with ``torch.optim.AdamW`` take 12. A step needs 30 bytes more for each element of the
        largest shard, but 120 MiB at most: a large shard is updated 2^22 elements at a time. Tensors that are
        not contiguous are copied.
    Source: AdamW: Loshchilov and Hutter, arXiv:1711.05101. Stochastic rounding of weights: Gupta et al.,
        arXiv:1502.02551; in the training of language models: Zamirai et al., arXiv:2010.06192.

    Example:
        >>> model = fs.load_pretrained(path, mesh=mesh, master_dtype=torch.bfloat16)
        >>> optimizer = fs.StochasticAdamW(model.parameters(), lr=1e-5)
        >>> result = fs.train_step(model, window, optimizer)
        >>> optimizer.state[model.lm_head.weight]["exp_avg"].dtype
        torch.bfloat16
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        seed: int = 0,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "seed": seed,
                "state_dtype": state_dtype,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in ``torch.optim.Optimizer``; one with a number out of range is refused."""
        numbers = {
            name: param_group.get(name, self.defaults[name])
            for name in ("lr", "betas", "eps", "weight_decay")
        }
        torch.optim.AdamW([torch.empty(0, requires_grad=True)], foreach=False, **numbers)  # refuses them
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned, with the moments in ``state_dtype``.

        ``torch.optim.Optimizer`` would cast the moments to the dtype of the parameter.
        """
        groups = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})
        numbers = [number for group in groups for number in group["params"]]
        for number, (parameter, group) in zip(numbers, self._parameters(), strict=True):
            if saved := state_dict["state"].get(number):
                dtype = group["state_dtype"] or parameter.dtype
                self.state[parameter] = {
                    # On the host; torch's fused optimizers keep theirs on the device.
                    "step": torch.tensor(float(saved["step"]), dtype=torch.float32),
                    **{name: saved[name].to(dtype=dtype, device=parameter.device) for name in _STATES},
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Function that computes the loss again and returns it; optional.

        Returns:
            What ``closure`` returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates = {id(group): float(group["lr"]) for group in self.param_groups}
        for place, (parameter, group) in enumerate(self._parameters()):
            if parameter.grad is None:
                continue
            state, dtype = self.state[parameter], group["state_dtype"] or parameter.dtype
            if not {parameter.dtype, dtype} <= _DTYPES:
                raise ValueError(
                    "StochasticAdamW steps parameters and moments of bfloat16, float32 and float64, got "
                    f"{parameter.dtype} with moments of {dtype!r}: keep them in one of these; a GradScaler's "
                    "float16 is for the compute (mp_policy) alone"
                )
            if not state:
                moments = {name: torch.zeros_like(parameter, dtype=dtype) for name in _STATES}
                state.update({"step": torch.tensor(0.0, dtype=torch.float32), **moments})
            state["step"] += 1
            _step_one(parameter, state, group, rates[id(group)], place)
        return loss

    def _parameters(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """Each parameter with its group, in their order, in which its place seeds its rounding."""
        return [(parameter, group) for group in self.param_groups for parameter in group["params"]]


def working_bytes(elements: int, dtype: torch.dtype) -> int:
    """Bytes that a step needs in addition to parameters, gradients and states.

    Args:
        elements: Number of elements of the largest shard.
        dtype: Dtype of parameters, gradients and states. If not bfloat16, only the denominator takes memory.
    """
    return min(elements, CHUNK) * (30 if dtype is torch.bfloat16 else dtype.itemsize)


def _step_one(
    parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any], rate: float, place: int
) -> None:
    """Update one parameter and its moments, ``CHUNK`` elements at a time."""
    step = int(state["step"])
    key = key_of(group["seed"], step, place)
    targets = [local_of(t) for t in (parameter, *(state[name] for name in _STATES))]
    flat = [t.reshape(-1) for t in targets]  # copies, if they are not contiguous
    gradient = local_of(parameter.grad).reshape(-1)  # type: ignore[arg-type]
    box, shape = box_of(parameter), tuple(parameter.shape)
    is_rounded = any(target.dtype is torch.bfloat16 for target in targets)
    for start in range(0, len(gradient), CHUNK):
        stop = min(start + CHUNK, len(gradient))
        _step_part(
            [t[start:stop] for t in flat],
            gradient[start:stop],
            group,
            rate,
            step,
            random_bits(key, numbers_in_whole(box, shape, start, stop, gradient.device))
            if is_rounded
            else None,
        )
    for target, whole in zip(targets, flat, strict=True):
        if not target.is_contiguous():
            target.copy_(whole.view(target.shape))


def _step_part(
    parts: list[torch.Tensor],
    gradient: torch.Tensor,
    group: dict[str, Any],
    rate: float,
    step: int,
    bits: torch.Tensor | None,
) -> None:
    """Update in place, by the operations of ``torch.optim.AdamW`` in their order.

    What it makes is gone before the next part.

    Args:
        parts: Some values of the parameter, of its first and of its second moments.
        gradient: Their gradients.
        group: Options of the parameter's group.
        rate: Its learning rate.
        step: Number of the parameter's step.
        bits: Random bits for each of the values; None if none of the parts is of bfloat16.
    """
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    values = [part.to(wide) for part in parts]  # a part that has this dtype is not copied
    value, mean, square = values
    gradient = gradient.to(wide)
    first, second = group["betas"]
    value.mul_(1 - rate * group["weight_decay"])
    mean.lerp_(gradient, 1 - first)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    denominator = square.sqrt().div_((1 - second**step) ** 0.5).add_(group["eps"])
    value.addcdiv_(mean, denominator, value=-rate / (1 - first**step))
    del gradient, denominator  # rounding needs as much memory again
    for lane, (part, value) in enumerate(zip(parts, values, strict=True)):
        if part.dtype is torch.bfloat16 and bits is not None:
            round_into(part, value.to(torch.float32), sixteen_of(bits, lane))
        elif part.dtype is not wide:
            part.copy_(value)


def key_of(*numbers: int) -> int:
    """A 64-bit number made from several numbers; other numbers, or another order, give another key."""
    key = 0
    for number in numbers:
        key = (key + _GAMMA + number) % _BITS
        for shift, factor in _MIX:
            key = (key ^ (key >> shift)) * factor % _BITS
    return key


def random_bits(key: int, numbers: torch.Tensor) -> torch.Tensor:
    """64 random bits for each of ``numbers``, the same on every device.

    Args:
        key: Key from ``key_of``; another key gives other bits.
        numbers: Numbers, int64; overwritten by the result.
    """
    bits = numbers.mul_(_signed(_GAMMA)).add_(_signed(key))
    for shift, factor in _MIX:
        # SplitMix64 shifts unsigned numbers. A shift of int64 fills up with copies of the sign bit, which the
        # mask removes.
        bits ^= (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            bits *= _signed(factor)
    return bits


def sixteen_of(bits: torch.Tensor, lane: int) -> torch.Tensor:
    """One of the four lanes of 16 bits in each of the 64-bit numbers: int32 in [0, 65536)."""
    half = bits.view(torch.int32).view(-1, 2)[:, lane // 2]
    return (half >> 16 * (lane % 2)).bitwise_and_(0xFFFF)


def numbers_in_whole(
    box: Box, shape: tuple[int, ...], start: int, stop: int, device: torch.device
) -> torch.Tensor:
    """Indices in the whole flattened tensor of the elements ``start`` to ``stop`` of a part, int64.

    Args:
        box: Place of the part in the whole tensor.
        shape: Shape of the whole tensor.
        start: Index of the first element in the flattened part.
        stop: Index after the last element.
        device: Device of the result.
    """
    left = torch.arange(start, stop, dtype=torch.int64, device=device)
    if tuple(box.shape[1:]) == tuple(shape[1:]):  # whole rows
        return left.add_(sum(box.offset[:1]) * math.prod(shape[1:]))
    found, stride = torch.zeros_like(left), 1
    for offset, extent, size in reversed(list(zip(box.offset, box.shape, shape, strict=True))):
        found.add_(left % extent, alpha=stride).add_(offset * stride)
        left.div_(extent, rounding_mode="floor")
        stride *= size
    return found


def round_into(target: torch.Tensor, values: torch.Tensor, noise: torch.Tensor) -> None:
    """Write float32 values into bfloat16, rounded up or down at random so that the mean is right.

    A value that bfloat16 can hold stays as it is, infinities and NaN included. A finite value stays finite.

    Args:
        target: bfloat16 tensor to write to.
        values: float32 tensor of the same shape; overwritten.
        noise: int32 tensor of the same shape, uniformly distributed in [0, 65536); overwritten.
    """
    bits, is_nan = values.view(torch.int32), values.isnan()
    # The number above the largest would be infinity.
    noise.masked_fill_(values.abs() >= torch.finfo(torch.bfloat16).max, 0)
    # A bfloat16 is the upper half of a float32's bits. Noise of 16 bits carries into it with a probability of
    # (lower half) / 65536, and a carry gives the next bfloat16 away from zero, whatever the exponent.
    bits.add_(noise).bitwise_and_(-(1 << 16))
    target.copy_(values.masked_fill_(is_nan, math.nan))


def _signed(number: int) -> int:
    """The int64 that has the bits of an unsigned 64-bit number."""
    return number - _BITS if number >= _BITS // 2 else number
