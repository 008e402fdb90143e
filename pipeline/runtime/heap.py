"""Python's heap in a stage's process."""

import gc


def freeze() -> None:
    """Keep all objects that exist now out of later garbage collections: they are never freed. For a process that has
    just loaded what it needs."""
    gc.collect()
    gc.freeze()
