"""Connections between the processes of a job: Unix sockets on one host, TCP with a handshake between hosts."""
