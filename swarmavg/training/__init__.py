"""Optimizers, schedules and model state in the swarm."""
