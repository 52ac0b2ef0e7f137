"""Benchmarks, one file each: a class with `run`, registered in the group `benchmark`, and a YAML of that name in
`configs/benchmark`.

Every benchmark first checks that what it times is right; a wrong result stops it before anything is reported.
"""
