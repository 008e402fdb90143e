"""The API's description, made when it is first asked for: most servers never are."""

import msgspec

from pipeline.config.settings import Limits as Caps
from pipeline.stages.gateway import docs_page, openapi

URL = "http://127.0.0.1:8000"
"""Where examples ask; which of a server's addresses a reader can reach is not for the server to know."""


class Description:
    """What /openapi.json and /docs say."""

    headers = docs_page.HEADERS

    def __init__(self, model: str, caps: Caps, has_keys: bool, has_admin_routes: bool) -> None:
        api = openapi.document(model, caps, has_keys, has_admin_routes)
        self.as_json = msgspec.json.encode(api)
        self.as_html = docs_page.page(api, URL).encode()
