"""The API's description, made when it is first asked for: most servers never are.

Examples ask where the reader has asked: the page is made once, and has that address put in for each reader.
"""

import re
from typing import Any

import msgspec

from pipeline.config.settings import Limits as Caps
from pipeline.stages.gateway.apidocs import openapi, page

_PLACE = "http://%SERVER%"
"""Stands for the address in the page until it is known; % is in no host, and no text is told of it."""
_NAME = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?", re.ASCII)
"""What a Host header may be to be repeated: nothing that a page or a shell could take for more than a name."""


def address_of(host: str | None, listener: Any) -> str:
    """Where a reader has asked: the Host header if that is one, else the listener's own name as sockets tell it."""
    if host is not None and _NAME.fullmatch(host):
        return f"http://{host}"
    name, port = listener[:2]
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


class Description:
    """What /openapi.json and /docs say."""

    headers = page.HEADERS

    def __init__(self, model: str, caps: Caps, has_keys: bool, has_admin_routes: bool) -> None:
        api = openapi.document(model, caps, has_keys, has_admin_routes)
        self.as_json = msgspec.json.encode(api)
        self._html = page.page(api, _PLACE).split(_PLACE)

    def as_html(self, address: str) -> bytes:
        """The page, whose examples ask at an address of `address_of`."""
        return address.join(self._html).encode()
