"""Requests, the operations that they name, and their status."""
