"""The report on a load, and its progress bar."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from fsdp_sft._ranks.agree import this_rank

_PROGRESS_AFTER_SECONDS = 3


@dataclass(frozen=True, repr=False)
class LoadReport:
    """What ``load_weights`` read, wrote and decided.

    Attributes:
        bytes_read: Tensor bytes that this rank has read.
        job_bytes_read: Tensor bytes that all ranks together have read.
        checkpoint_bytes: Bytes of all tensors in the checkpoint.
        seconds: Duration of the whole call, on this rank.
        loaded: Names of the parameters and buffers that were filled from the checkpoint.
        missing: Names that the checkpoint has no values for, though the model's class expects them.
        unexpected: Names in the checkpoint that the model has no place for.
        initialised: Names that the model's own initialisation filled: the missing ones, and those that its
            class allows to be missing.
        strategy: Strategy that was used: ``"slice"`` or ``"exchange"``.
        reason: Reason for that strategy, in words.
        class_bytes: Bytes of the checkpoint by how they become parameters: ``"identity"`` (a stored tensor as
            it is), ``"separable"`` (whole tensors side by side), ``"region"`` (parts of tensors) and
            ``"other"`` (converted as a whole).
        formats: Number of the checkpoint's tensors by the format in which they are stored, such as
            ``"bf16"``, ``"fp8 128x128"`` or ``"mxfp4"``.
        sources: Source of the values of every parameter and buffer, by name: ``"checkpoint"``, ``"tie"``
            (another name of a tensor listed before), ``"initialised"``, ``"computed"``, ``"copy"`` (of
            ``modules_to_save``) or ``"kept"`` (it had values already, as adapters have).

    Example:
        >>> report = model.load_report
        >>> report.bytes_read == report.checkpoint_bytes  # one rank reads all of it, once
        True
        >>> report.class_shares
        {'identity': 1.0, 'separable': 0.0, 'region': 0.0, 'other': 0.0}
        >>> print(report)
        loaded ... tensors: ... strategy slice: one process reads everything [identity 100.0%]
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
    formats: dict[str, int]
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def class_shares(self) -> dict[str, float]:
        """``class_bytes`` as fractions of their sum."""
        total = sum(self.class_bytes.values())
        return {kind: count / total if total else 0.0 for kind, count in self.class_bytes.items()}

    def __repr__(self) -> str:  # names of thousands of tensors are in the attributes
        return f"<{type(self).__name__}: {self}>"

    def __str__(self) -> str:
        speed = self.job_bytes_read / self.seconds / 1e9 if self.seconds > 0 else 0.0
        shares = ", ".join(f"{kind} {share:.1%}" for kind, share in self.class_shares.items() if share)
        return (
            f"loaded {len(self.loaded)} tensors: {_readable(self.job_bytes_read)} of "
            f"{' and '.join(self.formats)} read by all ranks, "
            f"{_readable(self.bytes_read)} by this one, in {self.seconds:.2f} s ({speed:.2f} GB/s), "
            f"strategy {self.strategy}: {self.reason} [{shares}]"
        )


def _readable(num_bytes: int) -> str:
    """A number of bytes in words."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on rank 0 that appears only if reading takes longer than a few seconds."""
    if this_rank() != 0:
        yield lambda _: None
        return
    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="loading weights (rank 0)",
        delay=_PROGRESS_AFTER_SECONDS,
    ) as bar:
        yield bar.update
