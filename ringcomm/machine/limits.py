"""The limits on the resources of this process."""

__all__ = ["limits", "soft_limit"]


def limits(kind: str) -> tuple[int, int] | None:
    """Return the soft and the hard limit of a kind such as RLIMIT_NOFILE; None if a sandbox denies getrlimit."""
    import resource  # POSIX only; importing ringcomm works everywhere

    try:
        return resource.getrlimit(getattr(resource, kind))
    except OSError:
        return None


def soft_limit(kind: str) -> int | None:
    """Return the limit that holds; None if there is none, or none is known."""
    import resource

    found = limits(kind)
    return None if found is None or found[0] == resource.RLIM_INFINITY else found[0]
