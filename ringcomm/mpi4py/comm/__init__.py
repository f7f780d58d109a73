"""The classes of communicators."""
