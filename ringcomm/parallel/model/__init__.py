"""A GPT of parallel layers; recomputation, metrics, and a check against one process."""
