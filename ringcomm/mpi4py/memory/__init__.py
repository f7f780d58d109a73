"""The memory of objects: the class buffer, and the protocols by which an object shows it."""
