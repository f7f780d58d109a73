"""A transport for ranks that share no memory: a wire takes its messages to other processes."""
