"""Time and memory on a CPU, beside the limit and the peers."""
