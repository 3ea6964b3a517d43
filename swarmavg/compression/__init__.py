"""Codecs: how tensor slices travel."""
