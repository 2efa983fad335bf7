"""What a training loop reports: memory, FLOPs, throughput and MFU, and where they are logged."""
