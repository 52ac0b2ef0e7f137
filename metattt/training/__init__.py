"""Training: the outer loop, through Lightning."""
