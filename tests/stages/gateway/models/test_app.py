"""The routes of the listeners that several models share."""

import json
from typing import Any

import msgspec
import pytest
from aiohttp import web

from pipeline.config.settings import Settings
from pipeline.http_server.access.key_accounts import KeyAccounts
from pipeline.stages.gateway.http.routes import ROUTES
from pipeline.stages.gateway.models.app import ModelsApp
from pipeline.stages.gateway.models.table import ModelTable
from tests.stages.gateway.gate import idle_api


def paths(app: web.Application) -> set[str]:
    return {resource.canonical for resource in app.router.resources()}


async def test_every_route_of_one_model_is_there_and_those_of_the_operator_at_the_admin_listener() -> None:
    accounts = KeyAccounts(None)
    found = ModelsApp(ModelTable(accounts, lambda _: None), Settings(), accounts)
    operators = {"/models/load", "/models/unload", *(route.path for route in ROUTES if route.is_admin)}
    with_all, without, admin = paths(found.app()), paths(found.app(has_admin_routes=False)), paths(found.admin_app())
    assert {route.path for route in ROUTES} <= with_all
    assert operators - {"/ping"} <= with_all - without, "/ping has a POST that is no operator's"
    assert admin == operators


@pytest.mark.parametrize("admin_port", [-1, 0])
async def test_a_models_description_has_the_operators_routes_if_clients_have_them(admin_port: int) -> None:
    gateway = msgspec.structs.replace(Settings().gateway, admin_port=admin_port)
    request: Any = None
    described = await idle_api(gateway).server.openapi(request)
    assert isinstance(described, web.Response) and isinstance(described.body, bytes)
    operators = {route.path for route in ROUTES if route.is_admin} - {"/ping"}
    found = operators & set(json.loads(described.body)["paths"])
    assert found == (operators if admin_port < 0 else set())
