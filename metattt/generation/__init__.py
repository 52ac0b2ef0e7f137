"""Sampling with carried state."""
