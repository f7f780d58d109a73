"""Datatypes: handles of layouts, and how these are made, copied and packed."""
