"""Traces: what every rank did, when, and whom it waited for."""
