"""What a training loop reports: memory, FLOPs, throughput and MFU, and the sinks they are logged to."""

from fsdp_sft.metrics.aggregate import aggregate_metrics
from fsdp_sft.metrics.flops import model_flops_per_token, peak_flops_per_second
from fsdp_sft.metrics.log import MetricLogger
from fsdp_sft.metrics.memory import memory_stats, reset_peak_memory
from fsdp_sft.metrics.plot import plot_run
from fsdp_sft.metrics.profiler import StepProfiler
from fsdp_sft.metrics.progress import ProgressBar
from fsdp_sft.metrics.sinks import MetricSink
from fsdp_sft.metrics.throughput import ThroughputMeter
from fsdp_sft.metrics.trace import trace_seconds
from fsdp_sft.metrics.trackers import TensorBoardSink, TrackioSink, WandbSink

__all__ = [
    "MetricLogger",
    "MetricSink",
    "ProgressBar",
    "StepProfiler",
    "TensorBoardSink",
    "ThroughputMeter",
    "TrackioSink",
    "WandbSink",
    "aggregate_metrics",
    "memory_stats",
    "model_flops_per_token",
    "peak_flops_per_second",
    "plot_run",
    "reset_peak_memory",
    "trace_seconds",
]
