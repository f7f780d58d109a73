"""Collectives of the GPUs of one host, which access each other's memory, by our own kernels or copy engines."""
