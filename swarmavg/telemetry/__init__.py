"""Logs and events."""
