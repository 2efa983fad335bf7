"""How long each part of the recorded steps took on a rank, read from its profiler trace."""

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsdp_sft._process.trace_spans import DEVICE, PREFIX
from fsdp_sft._tensors.disk import full_path

# Where FSDP2 makes the host wait for parameters and gradients. On an accelerator that wait is only queued.
_HOST_WAITS = re.compile(r"FSDP::(pre_forward|pre_backward|post_backward|root_post_backward)")


def trace_seconds(trace: str | Path) -> dict[str, float]:
    """Seconds of each part of the steps that a `StepProfiler` has recorded on one rank.

    Ranks wait for each other in every block, so a step takes the same time on all of them, even if only one
    is slow. The slow rank is the one that waits least in collectives.

    Args:
        trace: A trace of `StepProfiler`, with steps of `train_step` and batches of `windows`.

    Returns:
        `next_batches` and `wait_for_ranks` (of `windows`), `forward`, `backward`, `clip_gradients` and
        `optimizer` (of `train_step`), on the host, which on a GPU only queues the work. `collectives`: the
        time of NCCL's kernels, which includes their waiting, and on a CPU the time in which FSDP2 blocked the
        host. `computing`: the time of all other kernels, and on a CPU forward and backward without
        `collectives`. Both are left out for a device whose kernels are not in the trace.

    Raises:
        ValueError: If the file is no trace, or has no step of `train_step`.

    Memory: all events of the trace, on the host.

    Example:
        >>> with fs.StepProfiler("traces", first_step=1, last_step=2, ranks=None) as profiler:
        ...     for step, window in enumerate(fs.windows(loader, 1), start=1):
        ...         result = fs.train_step(model, window, optimizer)
        ...         profiler.end_step(step)
        >>> spread = fs.aggregate_metrics(fs.trace_seconds(profiler.trace), reduce="spread")
        >>> spread["computing_max_rank"]
        0
    """
    content = _content(full_path(trace))
    spans = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    found: dict[str, float] = {}
    for event in spans:
        name = str(event["name"])
        if name.startswith(PREFIX) and event.get("cat") == "user_annotation":
            part = name.removeprefix(PREFIX)
            found[part] = found.get(part, 0.0) + event["dur"] / 1e6
    if "forward" not in found:
        raise ValueError(f"{trace} has no step of train_step in it, by which its parts could be told")
    kernels = [event for event in spans if event.get("cat") == "kernel"]
    if kernels:
        collective = [event for event in kernels if "nccl" in str(event["name"]).lower()]
        found["collectives"] = _seconds(collective)
        found["computing"] = _seconds(kernels) - found["collectives"]
    elif content.get(DEVICE, "cpu") == "cpu":
        found["collectives"] = _seconds(event for event in spans if _HOST_WAITS.match(str(event["name"])))
        found["computing"] = max(0.0, found["forward"] + found.get("backward", 0.0) - found["collectives"])
    return found


def _content(trace: Path) -> dict[str, Any]:
    """The content of a trace, compressed or not."""
    try:
        data = trace.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        content["traceEvents"][:0]
    except (ValueError, EOFError, KeyError, TypeError, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{trace} is no trace of torch's profiler: {type(error).__name__}: {error}"
        ) from error
    return dict(content)


def _seconds(events: Iterable[dict[str, Any]]) -> float:
    """Summed durations."""
    return sum(float(event["dur"]) for event in events) / 1e6
