"""TCP backend."""
