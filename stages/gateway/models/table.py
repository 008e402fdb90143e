"""The models of the server by name: their states, as the supervisor tells them, and the stages that serve them."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING

from pipeline.config.settings import GatewaySettings
from pipeline.http_server.access.guard import current_scope
from pipeline.http_server.access.key_accounts import KeyAccounts
from pipeline.http_server.errors import timeout_error
from pipeline.http_server.request_turns import RequestTurns
from pipeline.runtime.messages.models import (
    RETRY_S,
    FromSharedGateway,
    KeepModel,
    LoadModel,
    ModelActivity,
    ModelReleased,
    Models,
    ModelState,
    ModelStatus,
    UnloadModel,
)
from pipeline.runtime.security.api_keys import NO_SCOPE
from pipeline.stages.gateway.admin.sleep import SleepControl
from pipeline.stages.gateway.admission.waiting_room import MESSAGE_PARTS, WaitingRoom
from pipeline.stages.gateway.errors import ApiError, invalid, shown
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.stages.gateway.readiness import Readiness
from pipeline.stages.gateway.zmq.serving.model import ZmqModel

if TYPE_CHECKING:
    from pipeline.stages.gateway.stage import GatewayStage

IDLE_S = 0.25
"""A model is reported idle this long after its last request, so that steady traffic reports nothing."""
ASK_AGAIN_S = 5.0
"""How soon a model is asked for again that is neither loaded nor in the queue."""
TAG = ":latest"
"""What Ollama's clients append to names."""


class ModelEntry:
    """A model, whether it is loaded or not."""

    def __init__(self, status: ModelStatus) -> None:
        self.status = status
        self.gateway: GatewayStage | None = None
        """Its stage in this process; None if it has none."""
        self.new_adapters: list[str] = []
        """Those that are being loaded."""
        self.num_open = 0
        """Requests that are open, or wait until it is loaded."""
        self.is_busy = False
        """As the supervisor knows it."""
        self.is_released = False
        """It is about to be unloaded: its requests wait until it is loaded again."""

    @property
    def name(self) -> str:
        return self.status.name

    @property
    def serves(self) -> bool:
        """Whether its stage takes requests."""
        return self.gateway is not None and not self.is_released and self.gateway.readiness.status == "ok"

    @property
    def state(self) -> ModelState:
        """As clients see it: the supervisor's report may lag behind a stage that serves."""
        return "loaded" if self.serves and self.status.state != "sleeping" else self.status.state

    @property
    def own_names(self) -> list[str]:
        return [self.name, *self.status.aliases]

    @property
    def adapters(self) -> list[str]:
        """Those of the settings, and those that clients have loaded."""
        return [*self.status.adapters, *(() if self.gateway is None else self.gateway.limits.adapters)]

    @property
    def names(self) -> list[str]:
        """All by which requests may choose it."""
        return [*self.own_names, *self.adapters]


class ModelTable:
    """Finds the model of a request, and waits until it is loaded."""

    def __init__(
        self, accounts: KeyAccounts, send: Callable[[FromSharedGateway], None], settings: GatewaySettings | None = None
    ) -> None:
        """`send` tells the supervisor."""
        settings = settings or GatewaySettings()
        self._accounts = accounts
        self._room = WaitingRoom(settings, accounts.keys)
        self._turns = RequestTurns()
        """Of requests whose models are loaded now: all that wait for one go on at once."""
        self._timeout_s = settings.request_timeout_s
        self._send = send
        self._models: dict[str, ModelEntry] = {}
        self._changed = asyncio.Event()
        self.is_ready = False
        """Whether those that are loaded at the start are."""
        self.is_ending = False

    def update(self, message: Models) -> None:
        """The supervisor has sent the states."""
        for status in message.models:
            model = self._models.setdefault(status.name, ModelEntry(status))
            model.status = status
            model.is_released &= status.state in ("loaded", "sleeping", "unloading")
        self.is_ready, self.is_ending = message.is_ready, message.is_ending
        self.changed()

    def changed(self) -> None:
        """Something may serve now that did not, or the reverse."""
        self._changed.set()
        self._changed = asyncio.Event()

    def add(self, name: str, gateway: "GatewayStage") -> None:
        """A stage has begun."""
        self._models[name].gateway = gateway
        self.changed()

    def remove(self, name: str, gateway: "GatewayStage") -> None:
        """A stage has ended. Another one may have taken its position."""
        if self._models[name].gateway is gateway:
            self._models[name].gateway = None
        self.changed()

    def allowed(self, scope: str | None = None) -> list[ModelEntry]:
        """Those that the API key of a scope may use, by default the current request's, in the order of the settings."""
        return [one for one in self._models.values() if any(self.allows(one, name, scope) for name in one.names)]

    def serving(self) -> list[ModelEntry]:
        """Those of `allowed` whose stages take requests."""
        return [one for one in self.allowed() if one.serves]

    def all(self) -> list[ModelEntry]:
        return list(self._models.values())

    def find(self, name: str, *, as_ollama: bool = False, scope: str | None = None) -> ModelEntry:
        """The model of this name, alias or adapter; Ollama's clients don't regard case, and append a tag. `scope` is
        that of the client's key, by default of the current request's. Raises ApiError, 404, also for one that the key
        may not use."""
        found = self._named(lambda known: known == name, scope)
        if found is None and as_ollama:
            folded = _folded(name)
            found = self._named(lambda known: _folded(known) == folded, scope)
        if found is None:
            raise self.unknown(name, scope)
        return found

    def _named(self, is_meant: Callable[[str], bool], scope: str | None) -> ModelEntry | None:
        """Names of models come first: clients give adapters their names, and none may take a model's requests."""
        models = self._models.values()
        for names in ([(one, one.own_names) for one in models], [(one, one.adapters) for one in models]):
            for one, known in names:
                if any(is_meant(name) and self.allows(one, name, scope) for name in known):
                    return one
        return None

    def default(self, scope: str | None = None) -> ModelEntry:
        """The first one that the client may use. Raises ApiError, 404."""
        if found := self.allowed(scope):
            return found[0]
        raise self.unknown("", scope)

    def of_connection(self, name: str | None, scope: str) -> ZmqModel:
        """The model of a ZeroMQ connection. Raises ApiError, 404."""
        return ZmqTarget(self, self.default(scope) if name is None else self.find(name, scope=scope), scope)

    def unknown(self, name: str, scope: str | None = None) -> ApiError:
        """404, in OpenAI's words, with the names that there are."""
        names = ", ".join(f"'{one.name}'" for one in self.allowed(scope)) or "none"
        message = f"the model '{shown(name)}' does not exist, or this API key has no access to it"
        if self._accounts.keys is None:
            message = f"the model '{shown(name)}' does not exist"
        return ApiError(HTTPStatus.NOT_FOUND, f"{message}; models are {names}", "model", "model_not_found")

    def unnamed(self) -> ApiError:
        """400: a request that chooses no model."""
        names = ", ".join(f"'{one.name}'" for one in self.allowed()) or "none"
        return ApiError(HTTPStatus.BAD_REQUEST, f"'model' is required: models are {names}", "model", "missing_model")

    def allowed_names(self, names: Iterable[str]) -> list[str]:
        """Of these models, those that the client may use."""
        allowed = {one.name for one in self.allowed()}
        return [name for name in names if name in allowed]

    @contextlib.contextmanager
    def adapter_name(self, model: ModelEntry, name: str) -> Iterator[None]:
        """An adapter of this name is being loaded. Raises ApiError, 400, if the name is another model's, or of an
        adapter of another one. A key that may not use the name learns nothing: the model's own stage refuses it."""
        others = [one for one in self._models.values() if one is not model]
        if self.allows(model, name) and any(name in one.names or name in one.new_adapters for one in others):
            message = f"the name '{shown(name)}' is taken by another model or its adapter"
            raise invalid("lora_name", message, "invalid_value")
        model.new_adapters.append(name)
        try:
            yield
        finally:
            model.new_adapters.remove(name)

    def allows(self, model: ModelEntry, name: str, scope: str | None = None) -> bool:
        """Whether the API key of a scope, by default the current request's, may use the model by one of its names."""
        account = self._accounts.of_scope(current_scope() if scope is None else scope)
        allowed = () if account is None else account.key.models
        return not allowed or name in allowed or (name in model.status.aliases and model.name in allowed)

    # ------------------------------------------------------------------------------------------------------- loading

    @contextlib.contextmanager
    def use(self, model: ModelEntry) -> Iterator[None]:
        """A request of the model is open, or waits until it is loaded."""
        model.num_open += 1
        if not model.is_busy:
            model.is_busy = True
            self._send(ModelActivity(model.name, True))
        try:
            yield
        finally:
            model.num_open -= 1
            if not model.num_open:
                asyncio.get_running_loop().call_later(IDLE_S, self._idle, model)

    def _idle(self, model: ModelEntry) -> None:
        if not model.num_open and model.is_busy:
            model.is_busy = False
            self._send(ModelActivity(model.name, False))

    def release(self, name: str) -> None:
        """The supervisor wants to unload an idle model. A request may have come since it was reported idle."""
        model = self._models[name]
        model.is_released = not model.num_open
        if model.num_open:
            model.is_busy = True
            self._send(ModelActivity(name, True))
        self._send(ModelReleased(name, model.is_released))

    def keep(self, model: ModelEntry, idle_s: float) -> None:
        """A client says how long the model stays without a request; below 0 for ever."""
        self._send(KeepModel(model.name, idle_s))

    def load(self, model: ModelEntry) -> None:
        """A client wants the model, also if it has just failed."""
        self._send(LoadModel(model.name, is_asked_for=True))

    def unload(self, model: ModelEntry) -> None:
        """A client wants the model to leave."""
        self._send(UnloadModel(model.name))

    async def until_loaded(
        self, model: ModelEntry, num_bytes: int = 0, scope: str = NO_SCOPE, left_s: float = math.inf
    ) -> "GatewayStage":
        """Have the model loaded, if it is not, for a request that keeps `num_bytes` meanwhile and may take `left_s`.
        Raises ApiError: 503 if it can't be, or if too much waits already, and 504 if it takes too long."""
        timeout_s = min(self._timeout_s or math.inf, left_s)
        with self._room.hold(num_bytes, scope):
            try:
                async with asyncio.timeout(timeout_s if timeout_s < math.inf else None):
                    while True:
                        gateway = await self._until_serves(model)
                        await self._turns.take_of(scope)
                        if model.serves:
                            return gateway
            except TimeoutError:
                raise timeout_error(timeout_s) from None

    async def _until_serves(self, model: ModelEntry) -> "GatewayStage":
        arrived_s, asked_s = time.time(), -1.0
        while not model.serves:
            status = model.status
            if self.is_ending:
                message = "the server is shutting down and takes no new requests"
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="draining")
            if status.state == "failed" and arrived_s - status.since_s < RETRY_S:
                raise self.failed(model)
            if status.state in ("unloaded", "failed") and not status.position and asked_s != status.since_s:
                asked_s = status.since_s
                self._send(LoadModel(model.name))
            try:
                async with asyncio.timeout(ASK_AGAIN_S):
                    await self._changed.wait()
            except TimeoutError:
                asked_s = -1.0
        assert model.gateway is not None
        return model.gateway

    def failed(self, model: ModelEntry) -> ApiError:
        """503: the model could not be loaded, or has ended since."""
        what = "has failed" if model.status.had_loaded else "could not be loaded"
        message = f"the model '{model.name}' {what}: {model.status.problem}"
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="model_not_loaded")


class ZmqTarget:
    """The `ZmqModel` of a connection to one of several."""

    def __init__(self, table: ModelTable, model: ModelEntry, scope: str) -> None:
        self._table = table
        self._model = model
        self._scope = scope

    @property
    def _gateway(self) -> "GatewayStage":
        if self._model.gateway is None:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the model is not loaded", code="model_not_loaded")
        return self._model.gateway

    @property
    def readiness(self) -> Readiness:
        return self._gateway.readiness

    @property
    def requests(self) -> RequestTable:
        return self._gateway.requests

    @property
    def limits(self) -> RequestLimits:
        return self._gateway.limits

    @property
    def sleep_control(self) -> SleepControl | None:
        return self._gateway.sleep_control

    @property
    def is_loaded(self) -> bool:
        return self._model.serves

    async def until_loaded(self, num_bytes: int) -> None:
        await self._table.until_loaded(self._model, MESSAGE_PARTS * num_bytes, self._scope)

    def use(self) -> contextlib.AbstractContextManager[None]:
        return self._table.use(self._model)

    def is_of(self, gateway: "GatewayStage") -> bool:
        return self._model.gateway is gateway


def _folded(name: str) -> str:
    return name.casefold().removesuffix(TAG)
