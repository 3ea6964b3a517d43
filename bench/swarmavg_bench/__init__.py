"""Benchmarks of swarmavg beside what users would pick instead. Never imported by the package."""
