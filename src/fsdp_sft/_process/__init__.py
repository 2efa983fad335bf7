"""What one process needs of its machine and of Python: no ranks, no model, no file format."""
