"""Beside the plain alternative; from the root of a checkout: ``python -m benchmarks.speed.load``."""
