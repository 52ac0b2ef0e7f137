"""Test-time training of a whole pretrained model: it scores a text mini-batch by mini-batch, and learns each after it
has been scored."""
