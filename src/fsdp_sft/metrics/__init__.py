"""What a training loop reports: memory, FLOPs, throughput and MFU, and where they are logged."""

from fsdp_sft.metrics.aggregate import aggregate_metrics
from fsdp_sft.metrics.flops import model_flops_per_token, peak_flops_per_second
from fsdp_sft.metrics.log import MetricLogger
from fsdp_sft.metrics.memory import memory_stats, reset_peak_memory
from fsdp_sft.metrics.plot import plot_run
from fsdp_sft.metrics.throughput import ThroughputMeter

__all__ = [
    "MetricLogger",
    "ThroughputMeter",
    "aggregate_metrics",
    "memory_stats",
    "model_flops_per_token",
    "peak_flops_per_second",
    "plot_run",
    "reset_peak_memory",
]
