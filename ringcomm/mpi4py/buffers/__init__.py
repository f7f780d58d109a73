"""Buffers of messages and collectives: an array, or a list of it with counts, displacements and datatypes."""
