"""Where an array becomes a pointer: adapters by type of array, and the protocols by which other objects show memory."""
