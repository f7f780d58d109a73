"""The commands of `ringcomm`. `bench`, `plot` and `tune` are in `ringcomm.bench`."""
