"""Ranges of ports, such as "40000-40100"."""

HIGHEST = 65535


def parse(text: str) -> range:
    """The ports of a range, of a single port, or none if the text is empty. Raises ValueError in words for the user."""
    if not text:
        return range(0)
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() or not dash)):
        raise ValueError(f'needs a range such as "40000-40100", got {text!r}')
    ports = range(int(first), int(last or first) + 1)
    if not ports or not 1 <= ports[0] <= ports[-1] <= HIGHEST:
        raise ValueError(f"needs ports from 1 to {HIGHEST} in ascending order, got {text!r}")
    return ports
