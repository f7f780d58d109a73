"""How bytes get from one rank to another: one file each, one contract."""
