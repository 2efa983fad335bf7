"""Tensors in memory and in files: boxes, formats, one reader, gathering, the disk. No model."""
