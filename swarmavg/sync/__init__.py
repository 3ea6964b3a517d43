"""The blocking API."""
