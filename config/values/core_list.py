"""Lists of cores as the Linux kernel writes them: `0-7,16-23`."""


def parse(text: str) -> list[int]:
    """The numbers of the cores, in order. Raises ValueError with a message for the user."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isascii() or not first.isdigit() or (dash and not (last.isascii() and last.isdigit())):
            raise ValueError(f"{text!r} is no list of cores such as '0-7,16-23'")
        begin, end = int(first), int(last) if dash else int(first)
        if begin > end or end >= 2**16:
            raise ValueError(f"{text!r} is no list of cores: {part.strip()!r} has no meaning")
        cores.update(range(begin, end + 1))
    return sorted(cores)
