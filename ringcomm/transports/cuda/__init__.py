"""Collectives of the GPUs of one host, by CUDA IPC and our own kernels: one launch for each call."""
