"""All layouts of a model on a cluster: the fastest, and those next to it."""
