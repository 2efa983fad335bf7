"""Reading checkpoints of other tools, without running any code that is in them."""
