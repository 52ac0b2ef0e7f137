"""Everything on disk that holds weights: one reader and one writer."""
