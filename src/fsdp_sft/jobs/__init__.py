"""Jobs that are preempted or hang: signals that become one decision, and a watchdog."""
