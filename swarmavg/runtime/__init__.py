"""Drives the protocol machines over channels: tasks, timers, retries and offloaded computation."""
