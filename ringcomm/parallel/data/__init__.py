"""Data parallelism: replicas that average their gradients, and share what they need for the optimizer (ZeRO)."""
