"""What is looked at or checked rather than timed."""
