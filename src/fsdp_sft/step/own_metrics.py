"""Values by name that a caller's loss returns beside the loss, summed over a window and over ranks."""

import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_sft._process.streams import LateValues
from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft._ranks.mesh import sum_over_mesh
from fsdp_sft.step.keys import are_equal, digest, to_compare

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def checked_metrics(metrics: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """The values as float64 0-dim tensors, those that are tensors on their own device.

    Raises:
        TypeError: For anything but a dict of numbers by name.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"loss_fn may return (loss, {{name: summed value}}), got (loss, {type(metrics).__name__})"
        )
    for name, value in metrics.items():
        is_number = isinstance(value, numbers.Real) or (
            isinstance(value, torch.Tensor)
            and not isinstance(value, DTensor)
            and value.numel() == 1
            and not value.is_complex()
            and value.layout == torch.strided
            and not value.is_meta
        )
        if not isinstance(name, str) or not is_number:
            got = f"{tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise TypeError(
                "a metric of loss_fn must be one number by its name, the sum over the batch; "
                f"got {name!r}: {got}"
            )
    return {
        name: value.detach().to(torch.float64).reshape(())
        if isinstance(value, torch.Tensor)
        else torch.tensor(float(value), dtype=torch.float64, device=device)
        for name, value in metrics.items()
    }


class OwnMetrics:
    """Sums by name over the batches of one rank, which stay on the device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._late: LateValues | None = None

    def add(self, metrics: dict[str, torch.Tensor]) -> None:
        """Add the values of a batch; it may lack names that other batches have."""
        for name, value in metrics.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def begin_copy(self) -> None:
        """Start to copy the sums to the host, which waits for them in ``over``."""
        self._late = LateValues(list(self._sums.values()))

    def over(self, mesh: "DeviceMesh | None", divisor: float) -> dict[str, float]:
        """The sums over all ranks, divided by ``divisor``; a name that only some ranks have counts as theirs.

        Collective: all ranks of the mesh.
        """
        if self._late is None:
            self.begin_copy()
        assert self._late is not None
        own = dict(sorted(zip(self._sums, self._late.read(), strict=True)))
        names = list(own)
        if mesh is not None and mesh.size() > 1:
            compared = to_compare([len(names), *digest(names)])
            if not are_equal(sum_over_mesh(compared, mesh), mesh.size()):
                names = sorted(set().union(*all_gather_objects(names)))
        if not names:
            return {}
        sums = sum_over_mesh([own.get(name, 0.0) for name in names], mesh)
        return {name: total / divisor for name, total in zip(names, sums, strict=True)}
