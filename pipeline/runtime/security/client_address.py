"""Who is at the other end of a connection, where no key says it."""

import asyncio
import ipaddress

PREFIX_BITS = 64
"""A client of IPv6 usually has all addresses of a /64 network, so they count as one."""


def client_address(transport: asyncio.BaseTransport | None) -> str:
    """The address of the client, or its IPv6 network; "" for other kinds of sockets."""
    return address_of(None if transport is None else transport.get_extra_info("peername"))


def address_of(peer: object) -> str:
    """The same for the address of a socket's peer."""
    if not isinstance(peer, tuple):
        return ""
    host = str(peer[0]).partition("%")[0]
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.ip_network((address, PREFIX_BITS), strict=False))
