"""Groups of ranks, their topologies, and what the handles of a communicator share."""
