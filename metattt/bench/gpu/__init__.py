"""`metattt bench gpu`: the Triton kernels on the device at hand, in stages that a failure cannot take anything from.

| file | what it is |
|---|---|
| `benchmark.py` | the settings, and the walk through the stages |
| `plan.py` | a stage as jobs (one process each) and points (one result each) |
| `processes.py`, `child.py` | a job in a process of its own, with limits of time |
| `ledger.py` | the file of results: a line for each, on the disk before the next is begun |
| `subjects.py` | what a point names: an operation, a peer, a ceiling, a tool |
| `origin.py` | the card, the libraries and the sources that results depend on |
| `operations.py`, `problems.py`, `decoding.py`, `calls.py` | checks and times of our operations |
| `others.py` | times of peers, ceilings, ours and the best of the peers in turn |
| `resources.py`, `tools.py` | registers, stack and shared memory; compute-sanitizer and ncu |
| `tuned.py` | the best launches, for the kernels' tables |
| `summary.py` | the report, from whatever there is |
"""
