"""Start and supervise ranks: `ringcomm run` for programs, `ringcomm.launch` for functions."""
