"""Claims of `claims.py`: the jobs that are run, how rows are compared, and a report for each kind of claim."""
