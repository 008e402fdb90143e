"""Where the settings of a server came from."""

import msgspec


class SettingsSource(msgspec.Struct, frozen=True):
    """The options of `pipeline serve` that give settings; see `load`."""

    config: str = ""
    """An absolute path, or the name of a preset; empty without --config."""
    sets: list[str] = []
    flags: dict[str, str] = {}
    options: list[tuple[str, str]] = []
    """vLLM's, with their values."""
