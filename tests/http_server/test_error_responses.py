"""An error response keeps nothing of the request that it refuses."""

import gc
import weakref
from http import HTTPStatus

from aiohttp.test_utils import make_mocked_request

from pipeline.http_server.error_responses import ERROR, error_response
from pipeline.http_server.errors import ApiError


class Body:
    """A request's."""


def test_a_response_does_not_keep_the_body_that_its_error_was_raised_for() -> None:
    bodies: list[weakref.ref[Body]] = []

    def parse() -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        try:
            raise ValueError("its decoder's")
        except ValueError as cause:
            raise ApiError(HTTPStatus.BAD_REQUEST, "not JSON") from cause

    def refuse() -> None:
        other = Body()
        bodies.append(weakref.ref(other))
        try:
            parse()
        except ApiError:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "no room") from None

    def blame() -> None:
        """The error has another cause than the one that was handled when it was raised."""
        try:
            parse()
        except ApiError:
            raise ApiError(HTTPStatus.BAD_REQUEST, "not valid") from ValueError("a rule")

    def gather() -> None:
        found: list[Exception] = []
        for function in (parse, blame):
            try:
                function()
            except ApiError as error:
                found.append(error)
        raise ApiError(HTTPStatus.BAD_REQUEST, "several") from ExceptionGroup("all", found)

    gc.disable()
    try:
        for function in (parse, refuse, blame, gather):
            try:
                function()
            except ApiError as error:
                response = error_response(make_mocked_request("POST", "/v1/completions"), error)
            assert isinstance(response[ERROR], ApiError)
            assert [body() for body in bodies] == [None] * len(bodies), "though it is not taken yet"
    finally:
        gc.enable()


def test_an_error_may_be_its_own_cause() -> None:
    error = ApiError(HTTPStatus.BAD_REQUEST, "raised again")
    error.__cause__ = ValueError("by something that keeps it")
    error.__cause__.__context__ = error
    assert error_response(make_mocked_request("POST", "/v1/completions"), error).status == HTTPStatus.BAD_REQUEST
