"""The model that a ZeroMQ connection is for."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from pipeline.http_server.access.key_accounts import Account
from pipeline.stages.gateway.admin.sleep import SleepControl
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.stages.gateway.readiness import Readiness

if TYPE_CHECKING:
    from pipeline.stages.gateway.stage import GatewayStage


class ZmqModel(Protocol):
    """A model. The first four change if it is unloaded and loaded again; they raise ApiError, 503, if it is not
    loaded."""

    @property
    def readiness(self) -> Readiness: ...

    @property
    def requests(self) -> RequestTable: ...

    @property
    def limits(self) -> RequestLimits: ...

    @property
    def sleep_control(self) -> SleepControl | None:
        """None if only the admin listener may put the model to sleep."""

    @property
    def is_loaded(self) -> bool: ...

    async def until_loaded(self, num_bytes: int) -> None:
        """Have it loaded, for a message of this size. Raises ApiError if it can't be, or if too much waits for that."""

    def use(self) -> contextlib.AbstractContextManager[None]:
        """A request of it is open."""

    def is_of(self, gateway: "GatewayStage") -> bool:
        """Whether this stage serves it."""


Choose = Callable[[str | None, str], ZmqModel]
"""Finds the model of a name, for the scope of an API key; None is the default one. Raises ApiError, 404."""


def limits_of(model: ZmqModel, account: Account | None) -> RequestLimits:
    """Those of a client's key, which may use some models only. Raises ApiError, 503, if the model is not loaded."""
    return model.limits if account is None else model.limits.for_key(account.key.models)


def refusal_of(model: ZmqModel, account: Account | None) -> ApiError | None:
    """Why no request of a client is admitted now."""
    try:
        model.readiness.require_ready()
        if account is not None:
            account.check()
    except ApiError as error:
        return error.with_traceback(None)  # else it would keep this frame
    return None


class OnlyModel:
    """That of a server of one model, which is always loaded."""

    is_loaded = True

    def __init__(
        self,
        readiness: Readiness,
        requests: RequestTable,
        limits: RequestLimits,
        sleep_control: SleepControl | None,
    ) -> None:
        self.sleep_control = sleep_control
        self.readiness = readiness
        self.requests = requests
        self.limits = limits

    async def until_loaded(self, num_bytes: int) -> None:
        """It is."""

    def use(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_of(self, gateway: "GatewayStage") -> bool:
        return True
