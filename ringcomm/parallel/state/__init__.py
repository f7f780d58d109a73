"""The state of a training: precision and optimizers, random numbers, checkpoints."""
