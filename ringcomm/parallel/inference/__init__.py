"""Inference: a model as it decodes, its cache of keys and values, and the choice of the next token."""
