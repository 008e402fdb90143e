"""The table of routes matches the application and the documentation."""

import re
from pathlib import Path

import msgspec.inspect
import pytest

from pipeline.config.settings import Settings
from pipeline.stages.gateway.http.route import Route
from pipeline.stages.gateway.http.routes import ROUTES, meant_route
from tests.stages.gateway.gate import idle_api

PAGES = sorted((Path(__file__).parents[4] / "docs" / "http").glob("*.md"))


def test_the_application_has_all_routes() -> None:
    app = idle_api(Settings().gateway).app()
    found = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert found >= {(route.method, route.path) for route in ROUTES}


@pytest.mark.parametrize("route", ROUTES, ids=[f"{route.method} {route.path}" for route in ROUTES])
def test_each_route_is_documented_and_its_types_are_known(route: Route) -> None:
    heading = re.compile(rf"^{re.escape(route.heading)}$", re.MULTILINE)
    assert len([page.name for page in PAGES if heading.search(page.read_text("utf-8"))]) == 1
    for kind in (route.body, route.reply, route.event):
        for one in kind if isinstance(kind, tuple) else (kind,):
            assert one is None or msgspec.inspect.type_info(one)
    assert (route.body is None) <= (not route.unsupported_fields)
    for name in route.unsupported_fields:
        assert name not in route.body.__struct_fields__, f"{name} is both accepted and refused"


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
        ("GET", "/models", "/v1/models"),
        ("GET", "/v1/health", "/health"),
        ("GET", "/chat/completions", ""),
        ("GET", "/nothing", ""),
    ],
)
def test_a_path_that_is_nearly_a_route_is_named(method: str, path: str, meant: str) -> None:
    assert meant_route(method, path) == (f"; did you mean {meant}?" if meant else "")
