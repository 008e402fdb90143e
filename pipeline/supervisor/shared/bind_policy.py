"""The bind policy: without API keys, a server only listens on loopback addresses, unless its settings allow clients
without keys."""

import ipaddress
import logging
import os
import socket

from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.config.values import zmq_setting
from pipeline.runtime.security import api_keys
from pipeline.runtime.security.api_keys import FILE_KEY, SERVER_VARIABLE, Keys
from pipeline.runtime.security.key_book import KeyBook


def keys_of(
    settings: Settings, log: logging.Logger, given: Keys | None = None, book: KeyBook | None = None
) -> Keys | None:
    """The API keys of a server that is about to listen: those `given`, or else of its settings and environment, from
    which they are removed. `book` can read them again. Raises ConfigError if it has none and may not listen at its
    address without."""
    path, tables = settings.gateway.api_keys_file, settings.keys
    if given is not None or path or tables or SERVER_VARIABLE in os.environ:
        api_keys.keep_out_of_core_dumps()
    book = book or KeyBook()
    if given is None:
        book.take_environment(os.environ)
    keys, warnings = (given, []) if given is not None else book.read(path, tables)
    api_keys.forget(os.environ)
    check(settings, keys is not None)
    for warning in warnings:
        log.warning(warning)
    if (found := hint(settings, keys is not None)) is not None:
        log.info(found)
    return keys


def check(settings: Settings, has_keys: bool) -> None:
    """Raise ConfigError if clients on other machines could use the server without keys, and the settings don't allow
    it."""
    gateway = settings.gateway
    if has_keys or gateway.allow_unauthenticated:
        return
    problems = []
    if not is_loopback(gateway.host, gateway.port):
        problems.append(f"gateway.host: {_refusal(gateway.host)}")
    if zmq_setting.is_open_to_others(gateway.zmq):
        problems.append(f"gateway.zmq: {_refusal(gateway.zmq)}")
    if problems:
        raise ConfigError(problems)


def hint(settings: Settings, has_keys: bool) -> str | None:
    """A warning about host names, for a server that other machines can reach without keys."""
    gateway = settings.gateway
    if has_keys or gateway.allowed_hosts or is_loopback(gateway.host, gateway.port):
        return None
    return (
        "without API keys, requests that use a host name are answered 403 unless gateway.allowed_hosts lists the name; "
        "requests that use an IP address are served"
    )


def _refusal(where: str) -> str:
    return (
        f"{where} can be reached from other machines, and the server has no API keys: set some "
        f"({FILE_KEY}, [[keys]], or {SERVER_VARIABLE} in its environment), or listen on 127.0.0.1, or set "
        "gateway.allow_unauthenticated = true to serve clients without keys"
    )


def is_loopback(host: str, port: int = 0) -> bool:
    """Whether all addresses of a host are loopback addresses. Raises ConfigError if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        why = error.strerror or str(error)
    except UnicodeError:
        why = "this is no name"
    else:
        return all(_is_own(str(address[0])) for *_, address in found)
    raise ConfigError([f"cannot listen on {host}:{port}: {why}; choose another gateway.host (--host)"])


def _is_own(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
