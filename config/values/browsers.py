"""Host names and origins as browsers write them, and what gateway.allowed_hosts and allowed_origins may list.

Pure functions: the settings are checked by them at start, and requests by the gateway.
"""

import ipaddress
import re
from typing import NamedTuple

ANY = "*"
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{0,5}))?", re.ASCII)
_ORIGIN = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>.+)", re.ASCII)
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Authority(NamedTuple):
    """HOST or HOST:PORT, in one spelling: lower case, no trailing dot, addresses as `ipaddress` writes them."""

    host: str
    port: int | None = None

    @property
    def is_ip(self) -> bool:
        """Whether the host is an address: no name server can make it another one."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


class Origin(NamedTuple):
    """SCHEME://HOST[:PORT], the port filled in where the scheme has a default."""

    scheme: str
    host: str
    port: int | None


def parse_authority(text: str) -> Authority | None:
    """The value of a Host header; None if it is not valid."""
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        return None
    port = int(match["port"]) if match["port"] else None
    host = _host_of(match["v6"], match["name"])
    return None if host is None or (port is not None and port > 65535) else Authority(host, port)


def _host_of(v6: str | None, name: str | None) -> str | None:
    try:
        if name is None:
            return str(ipaddress.IPv6Address(v6))
        name = name.lower().removesuffix(".")
        return name or None
    except ValueError:
        return None


def parse_origin(text: str) -> Origin | None:
    """The value of an Origin header; None if it is not an origin, such as `null`."""
    match = _ORIGIN.fullmatch(text)
    authority = parse_authority(match["authority"]) if match else None
    if match is None or authority is None:
        return None
    scheme = match["scheme"].lower()
    return Origin(scheme, authority.host, authority.port or _DEFAULT_PORTS.get(scheme))


def is_listed(host: str, allowed: frozenset[str]) -> bool:
    """Whether a host (of an `Authority`) is among the entries of gateway.allowed_hosts, as `normalized_host` has them:
    names, `*.NAME` for all names below one, or `*` for all."""
    if ANY in allowed or host in allowed:
        return True
    labels = host.split(".")
    return any(f"*.{'.'.join(labels[i:])}" in allowed for i in range(1, len(labels)))


def normalized_host(entry: str) -> str | None:
    """An entry of gateway.allowed_hosts; None if it is not valid."""
    if entry == ANY:
        return ANY
    prefix, name = ("*.", entry[2:]) if entry.startswith("*.") else ("", entry)
    authority = parse_authority(name)
    if authority is None or ":" in name.rpartition("]")[2]:
        return None
    return prefix + authority.host


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
"""Names of methods and headers, RFC 9110."""


def is_token(text: str) -> bool:
    """Whether a text can be the name of a method or a header."""
    return _TOKEN.fullmatch(text) is not None


def cors_problems(allowed_methods: tuple[str, ...], allowed_headers: tuple[str, ...]) -> list[str]:
    """What is wrong with these settings, as `problems_of`."""
    listed = (("allowed_methods", "method", allowed_methods), ("allowed_headers", "header", allowed_headers))
    return [
        f'gateway.{key}: "{entry}" is not the name of a {what}: write names, or "*" for any {what}'
        for key, what, entries in listed
        for entry in entries
        if not _TOKEN.fullmatch(entry)
    ]


def problems_of(
    allowed_hosts: tuple[str, ...], allowed_origins: tuple[str, ...], allowed_media_domains: tuple[str, ...] = ()
) -> list[str]:
    """What is wrong with these settings, each a sentence that begins with the key."""
    listed = (("allowed_hosts", "pipeline", allowed_hosts), ("allowed_media_domains", "images", allowed_media_domains))
    found = [
        f'gateway.{key}: "{entry}" is not a host name: write it without scheme, port and path, as '
        f'"{example}.example.com", "*.example.com" for all names below it, or "*" for any name'
        for key, example, entries in listed
        for entry in entries
        if normalized_host(entry) is None
    ]
    found += [
        f'gateway.allowed_origins: "{entry}" is not an origin: write SCHEME://HOST or SCHEME://HOST:PORT without a '
        'path, as "https://chat.example.com", or "*" for any origin'
        for entry in allowed_origins
        if entry != ANY and parse_origin(entry) is None
    ]
    return found
