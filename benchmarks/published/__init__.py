"""The planner beside what others have published."""
