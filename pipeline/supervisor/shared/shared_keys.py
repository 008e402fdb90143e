"""The API keys of a running server, and the memory in which its gateways count what each of them uses."""

import os

from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.metrics.stats import KeyUsage
from pipeline.runtime.security import key_usage
from pipeline.runtime.security.api_keys import FILE_KEY, Keys
from pipeline.runtime.security.key_book import KeyBook
from pipeline.runtime.security.key_usage import UsageMemory


class SharedKeys:
    """Owns two descriptors that the gateways inherit. Both are -1 if the server has no keys."""

    def __init__(self, keys: Keys | None, book: KeyBook | None = None) -> None:
        """`book` has read the keys, and can read them again; None if they can't be read again."""
        self._keys, self._book = keys, book
        self.fd = -1 if keys is None else keys.share()
        self.usage_fd = -1 if keys is None else key_usage.create()
        self._memory = None if keys is None else UsageMemory(self.usage_fd)
        self._slots = {} if keys is None else {one.name: one.slot for one in keys.all}
        """Of all names so far."""

    @property
    def are_needed(self) -> bool:
        """Whether clients need a key."""
        return self.fd >= 0

    def usage(self) -> list[KeyUsage]:
        """What each key has used."""
        return [] if self._memory is None else self._memory.usage(self._slots)

    def read_again(self, settings: Settings) -> tuple[Keys | None, list[str]]:
        """The keys as these settings say, for `use`, and warnings. None if the server has no keys, or if they are not
        from settings. Raises ConfigError: the keys stay as they are."""
        if self._book is None:
            return None, []
        keys, warnings = self._book.read(settings.gateway.api_keys_file, settings.keys)
        if (keys is None) == self.are_needed:
            change = "with API keys can have none" if keys is None else "without API keys can get some"
            raise ConfigError([f"{FILE_KEY}, keys: a server {change} only by a restart"])
        return keys, warnings

    def change_to(self, keys: Keys | None) -> str:
        """What differs between the keys in use and others, in words; empty if nothing does."""
        return "" if self._keys is None or keys is None else self._keys.change_to(keys)

    def use(self, keys: Keys) -> None:
        """Replace the keys that gateways read."""
        assert self._keys is not None
        keys.write(self.fd)
        self._keys = keys
        self._slots |= {one.name: one.slot for one in keys.all}

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        for fd in (self.fd, self.usage_fd):
            if fd >= 0:
                os.close(fd)
