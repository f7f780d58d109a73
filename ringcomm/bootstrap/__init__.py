"""How the ranks of a job find each other: a key-value store, and descriptors passed over sockets."""
