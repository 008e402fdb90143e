"""Which URLs of clients the server may fetch, and which addresses it may connect to for that. Pure.

There is one parser of URLs, the one that the fetching client uses too: what is checked here is what is connected to.
"""

import ipaddress
from collections.abc import Collection

from yarl import URL

from pipeline.config.values.browsers import is_listed, parse_authority

MAX_URL_CHARS = 2048
HTTPS_PORT = 443
NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Addresses that stand for those of IPv4 in their last 32 bits, RFC 6052."""
UNICAST = ipaddress.ip_network("2000::/3")
"""All that is assigned of IPv6 for the internet, RFC 4291. What is elsewhere is local (fec0::/10), or stands for an
address of IPv4 (::/96, ::ffff:0:0:0/96, 64:ff9b:1::/48)."""
OTHERS = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "168.63.129.16/32", "3fff::/20")))
"""None of the internet either, which `ipaddress` does not know, or not in each version: addresses of protocols (of the
metadata service of a cloud, too), the host's agent in Azure, and those of documentation, RFC 9637."""


def checked_url(text: str, allowed: Collection[str]) -> URL:
    """The URL, if it may be fetched. `allowed` is gateway.allowed_media_domains, normalized. Raises ValueError: why
    not, in words that follow the field's name."""
    if len(text) > MAX_URL_CHARS:
        raise ValueError(f"has {len(text)} characters; a URL can have {MAX_URL_CHARS}")
    if not text.isprintable() or "\\" in text or " " in text:
        raise ValueError("is no valid URL: it has a space, a backslash or a control character")
    try:
        url = URL(text)
    except ValueError:
        raise ValueError("is no valid URL") from None
    if url.scheme != "https":
        raise ValueError("is not an https: URL, and no others are fetched")
    if url.user is not None or url.password is not None:
        raise ValueError("has a user name or a password, and the server sends none")
    host = url.raw_host or ""
    authority = parse_authority(f"[{host}]" if ":" in host else host)
    if authority is None or authority.host != host:
        raise ValueError("has no valid host name")
    if authority.is_ip:
        raise ValueError("has an IP address in place of a host name")
    if url.port != HTTPS_PORT:
        raise ValueError(f"has port {url.port}; the server connects to port {HTTPS_PORT} only")
    if not is_listed(authority.host, frozenset(allowed)):
        raise ValueError(f"is at '{authority.host}', which is not in gateway.allowed_media_domains")
    return url.with_fragment(None)


def is_public(address: str) -> bool:
    """Whether an IP address, as a name server answers, is one of the internet: not of this machine, of its network, or
    of none, also if it stands for another address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if (inner := found.ipv4_mapped or found.sixtofour) is not None:
            return is_public(str(inner))
        if found.teredo is not None or found not in UNICAST:
            return False
    return found.is_global and not found.is_multicast and not any(found in network for network in OTHERS)
