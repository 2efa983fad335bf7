"""What ends a job or hangs: signals that become one decision, and a watchdog."""
