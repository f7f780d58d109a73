"""Calls of arrays on GPUs through host memory: `calls` does or queues them, `staging` does a collective in `chunks`."""
