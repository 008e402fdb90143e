"""The table of HTTP routes, from which the application and the API description are built.

The page of the route's API in docs/http/ has its examples, under its `heading`.
"""

from pipeline.stages.gateway.admin import routes as admin
from pipeline.stages.gateway.apis.table import API_ROUTES

ROUTES = (*API_ROUTES, *admin.ROUTES)


def meant_route(method: str, path: str) -> str:
    """The route that a path without /v1, with it twice, or with a slash at its end probably means, as the rest of a
    sentence; empty if there is none."""
    bare = path.rstrip("/").removeprefix("/v1")
    known = {route.path for route in ROUTES if route.method == method}
    meant = next((one for one in (f"/v1{bare}", bare) if one in known and one != path), "")
    return f"; did you mean {meant}?" if meant else ""
