"""Calls on a communicator: messages, collectives and reductions, of arrays and of objects."""
