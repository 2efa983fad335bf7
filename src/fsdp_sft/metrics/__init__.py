"""What a training loop reports: memory, FLOPs, throughput and MFU, and the sinks they are logged to."""

from fsdp_sft.metrics.flops import model_flops_per_token, peak_flops_per_second
from fsdp_sft.metrics.log import MetricLogger
from fsdp_sft.metrics.memory import memory_stats, reset_peak_memory
from fsdp_sft.metrics.throughput import ThroughputMeter

__all__ = [
    "MetricLogger",
    "ThroughputMeter",
    "memory_stats",
    "model_flops_per_token",
    "peak_flops_per_second",
    "reset_peak_memory",
]
