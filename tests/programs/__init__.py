"""Programs drawn at random: lists of steps that a user might write, beside the same in plain PyTorch."""
