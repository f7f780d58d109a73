"""ZeRO, stages 1 and 2: each replica keeps a shard of the optimizer states, and of the gradients."""
