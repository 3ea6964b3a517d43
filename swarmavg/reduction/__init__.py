"""Weighted accumulation of the range that this peer reduces."""
