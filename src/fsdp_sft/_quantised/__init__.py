"""Quantised formats: which stored tensors belong together, and the values that they hold."""
