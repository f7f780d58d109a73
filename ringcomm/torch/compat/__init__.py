"""What torch's versions and tools ask of a backend, beside calls."""
