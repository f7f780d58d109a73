"""Memory that kernels run on: of a GPU, or of the emulated device, which is the CPU in its place."""
