"""The known layers: their families and papers, what their equations say, what a few tokens tell of them, the table."""
