"""Benchmarks of `speed.py`, one file each: a dataclass of settings with `run`, which checks first and then measures."""
