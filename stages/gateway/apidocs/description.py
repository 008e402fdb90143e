"""The API description, built at its first use.

The examples of the page use the address that the reader used: the page is built once, and the address is inserted for
each reader.
"""

import re
from typing import Any

import msgspec

from pipeline.config.settings import LimitSettings as Caps
from pipeline.stages.gateway.apidocs import openapi, page

_SERVER = "http://%SERVER%"
"""Placeholder of the address in the page. Host names have no %."""
_NAME = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?", re.ASCII)
"""Host headers that are safe to repeat in a page and in a shell command."""


def address_of(host: str | None, listener: Any, scheme: str = "http") -> str:
    """The URL that the reader used: from the Host header if it is valid, else the listener's address."""
    if host is not None and _NAME.fullmatch(host):
        return f"{scheme}://{host}"
    name, port = listener[:2]
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


class Description:
    """The contents of /openapi.json and /docs."""

    headers = page.HEADERS

    def __init__(self, model: str, caps: Caps, has_keys: bool, has_admin_routes: bool) -> None:
        api = openapi.document(model, caps, has_keys, has_admin_routes)
        self.as_json = msgspec.json.encode(api)
        self._html = page.page(api, _SERVER).split(_SERVER)

    def as_html(self, address: str) -> bytes:
        """The page, with examples for an address of `address_of`."""
        return address.join(self._html).encode()
