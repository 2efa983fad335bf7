"""What a load did."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
