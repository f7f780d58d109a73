"""Devices that run kernels: a GPU, or the emulated device on the CPU."""
