"""The inner loop: accessors, forms, packing and the scan through time."""
