"""The algebra of a chunk of tokens that forms, learners, inner optimizers and mixers share: functions of tensors."""
