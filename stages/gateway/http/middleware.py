"""What every response has in common: the form of errors."""

from aiohttp import web
from aiohttp.typedefs import Handler

from pipeline.http_server.access.key_accounts import ACCOUNT
from pipeline.http_server.apis.table import family_of
from pipeline.http_server.error_responses import REQUEST_ID, error_response
from pipeline.stages.gateway.errors import ApiError, shown
from pipeline.stages.gateway.http.routes import meant_route


@web.middleware
async def format_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return all errors in the shape of the API that their path belongs to, including those of aiohttp's router."""
    try:
        return await handler(request)
    except ApiError as error:
        if (account := request.get(ACCOUNT)) is not None and REQUEST_ID not in request:
            account.refused(error.status)
        return error_response(request, error)
    except web.HTTPMethodNotAllowed as refusal:
        message = f"{request.method} is not allowed for {shown(request.path)}"
        return error_response(request, ApiError(refusal.status, message), {"Allow": refusal.headers["Allow"]})
    except web.HTTPNotFound as refusal:
        advice = family_of(request.path).not_found_advice(request.path) or meant_route(request.method, request.path)
        message = f"Not found: {request.method} {shown(request.path)}{advice}"
        return error_response(request, ApiError(refusal.status, message))
    except web.HTTPException as refusal:
        return error_response(request, ApiError(refusal.status, refusal.text or refusal.reason))
