"""One sequence over several processes: each reads a part of the time, or some of the heads."""
