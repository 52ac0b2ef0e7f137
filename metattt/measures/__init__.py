"""What training and evaluation measure; imports neither."""
