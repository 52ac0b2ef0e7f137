"""Functions of tensors for a chunk of tokens, shared by forms, learners, inner optimizers and mixers."""
