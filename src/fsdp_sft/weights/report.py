"""What a load did, and how far it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_sft._agree import this_rank

_PROGRESS_AFTER_SECONDS = 3


@dataclass(frozen=True)
class LoadReport:
    """What ``load_weights`` read, wrote and decided.

    Attributes:
        bytes_read: Tensor bytes that this rank's read calls returned.
        job_bytes_read: The same over all ranks.
        checkpoint_bytes: Bytes of all tensors in the checkpoint.
        seconds: Of the whole call, on this rank.
        loaded: Names of the parameters and buffers that were filled from the checkpoint.
        missing: Names that the checkpoint has no values for, though the model's class expects them.
        unexpected: Names in the checkpoint that the model has no place for.
        initialised: Names that the model's own initialisation filled: the missing ones, and those that its
            class allows to be missing.
        strategy: ``"slice"`` or ``"exchange"``.
        reason: Why that strategy.
        class_bytes: Checkpoint bytes by plan class: ``"identity"``, ``"separable"``, ``"region"`` and
            ``"other"``; see ``plan.Target``.
        sources: Every parameter and buffer of the model, by name, to what its values come from:
            ``"checkpoint"``, ``"tie"`` (another name of one before), ``"initialised"``, ``"computed"``,
            ``"copy"`` (of ``modules_to_save``) or ``"kept"`` (it had values: adapters, for instance).
    """

    bytes_read: int
    job_bytes_read: int
    checkpoint_bytes: int
    seconds: float
    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    initialised: list[str]
    strategy: str
    reason: str
    class_bytes: dict[str, int]
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def class_shares(self) -> dict[str, float]:
        """Fraction of the checkpoint's bytes by plan class."""
        total = sum(self.class_bytes.values())
        return {kind: count / total if total else 0.0 for kind, count in self.class_bytes.items()}

    def __str__(self) -> str:
        speed = self.job_bytes_read / self.seconds / 1e9 if self.seconds > 0 else 0.0
        shares = ", ".join(f"{kind} {share:.1%}" for kind, share in self.class_shares.items() if share)
        return (
            f"loaded {len(self.loaded)} tensors: {_readable(self.job_bytes_read)} read by all ranks, "
            f"{_readable(self.bytes_read)} by this one, in {self.seconds:.2f} s ({speed:.2f} GB/s), "
            f"strategy {self.strategy}: {self.reason} [{shares}]"
        )


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


class progress_bar:
    """A progress bar on rank 0, seen only if the reading takes a while."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._bar: Any = None

    def __enter__(self) -> Callable[[int], None]:
        if this_rank() != 0:
            return lambda _: None
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

        self._bar = tqdm(
            total=self._total,
            unit="B",
            unit_scale=True,
            desc="loading weights (rank 0)",
            delay=_PROGRESS_AFTER_SECONDS,
        )
        update: Callable[[int], None] = self._bar.update
        return update

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
