"""The kernels alone, all ranks on one device: checked with new inputs before every launch, and timed."""
