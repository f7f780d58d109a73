"""How the ranks of a job find each other: a store where they gather facts, and descriptors passed over sockets."""
