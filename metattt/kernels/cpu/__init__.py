"""What the kernels on the CPU share."""
