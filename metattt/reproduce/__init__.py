"""`metattt reproduce`: claims of papers, tried at a size that fits the machine: cells that are runs, and a report."""
