"""Suites of checks that an implementation of one of the interfaces must pass; for third parties too."""
