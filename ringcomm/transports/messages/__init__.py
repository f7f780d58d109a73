"""A transport for ranks that share no memory: a link carries its messages to other processes."""
