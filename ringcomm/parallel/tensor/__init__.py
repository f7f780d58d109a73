"""Tensor and sequence parallelism: layers whose weights are sharded over the ranks of an axis."""
