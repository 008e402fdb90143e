"""The routes of the listeners that several models share."""

from aiohttp import web

from pipeline.config.settings import Settings
from pipeline.http_server.access.key_accounts import KeyAccounts
from pipeline.stages.gateway.http.routes import ROUTES
from pipeline.stages.gateway.models.app import ModelsApp
from pipeline.stages.gateway.models.table import ModelTable


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
