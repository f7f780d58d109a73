"""Collectives of the GPUs of one host, by CUDA IPC and kernels of our own: one launch for each call."""
