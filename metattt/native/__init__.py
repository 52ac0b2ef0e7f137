"""C++ for the CPU: compiled on first use, called by several threads; and what a model does between matrix products."""
