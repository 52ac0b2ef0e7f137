"""Sweeps: one command for every point of a grid, or for what an optimiser proposes, through Hydra's sweepers and
launchers; and the table of what came out."""
