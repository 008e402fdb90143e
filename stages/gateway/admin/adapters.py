"""LoRA adapters that clients may use: which there are, and POST /v1/load_lora_adapter and /v1/unload_lora_adapter.

    client ──► this gateway ──SetAdapter──► supervisor ──Adapters──► every gateway
                   ▲                            │
                   └────────AdapterSet──────────┘

This gateway converts the adapter's folder into a file that the executor maps. The supervisor keeps the list, so it
outlives every stage. Requests that were sent before an adapter was unloaded, or replaced, end with it: their options
name its file.
"""

import asyncio
import logging
import os
import time
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pipeline.config.settings import Settings
from pipeline.lora.convert import WEIGHTS, convert, dtype_of
from pipeline.lora.peft_config import CONFIG, AdapterError, NotAnAdapter, NotWritten
from pipeline.runtime import messages as m
from pipeline.runtime.files.regular_files import OutsideFolders
from pipeline.runtime.log.limited_log import LimitedLog
from pipeline.runtime.queues.work_pool import PoolFull, WorkPool
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.admin.pending_replies import PendingReplies
from pipeline.stages.gateway.errors import ApiError, invalid, overloaded
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits

TIMEOUT_S = 5.0
"""How long to wait for the supervisor."""
LOAD_TIMEOUT_S = 120.0
"""How long an adapter may wait for a thread, and its files for the disk."""
MAX_THREADS = 2
"""Loads at once. One that reads from a network share that has died keeps its thread; all others go on."""
MAX_PENDING = 16
"""Loads that wait."""
MAX_ADAPTERS = 4096

Name = Annotated[str, Meta(min_length=1, max_length=256)]
FolderPath = Annotated[str, Meta(min_length=1, max_length=4096)]


class LoadAdapterBody(msgspec.Struct):
    """POST /v1/load_lora_adapter"""

    lora_name: Annotated[Name, Meta(description="The model's name in requests.")]
    lora_path: Annotated[
        FolderPath,
        Meta(description="An absolute path of the server's machine: a folder in PEFT's format, or a .gguf file."),
    ]
    load_inplace: Annotated[bool, Meta(description="Replace an adapter of this name.")] = False


class UnloadAdapterBody(msgspec.Struct):
    """POST /v1/unload_lora_adapter"""

    lora_name: Name


load_bodies = msgspec.json.Decoder(LoadAdapterBody)
unload_bodies = msgspec.json.Decoder(UnloadAdapterBody)


NO_ADAPTER = (
    "'lora_path' is no adapter that the server may load: it must be a folder with adapter_config.json and "
    "adapter_model.safetensors, or a .gguf adapter, readable for the server, no larger than lora.max_adapter_bytes, "
    "and in lora.allowed_folders if that is set. The server's log says more"
)


def convert_allowed(source: Path, model_dir: Path, settings: Settings, deadline_s: float) -> str:
    """Convert an adapter that a client has named; see `convert`. Raises NotAnAdapter, too, if it is not in an allowed
    folder. In one, errors tell what is wrong."""
    folders = [os.path.realpath(os.path.expanduser(one)) for one in settings.lora.allowed_folders]  # noqa: PTH111
    lora = settings.lora
    if folders:
        for path in (source, source / CONFIG, source / WEIGHTS):
            real = Path(os.path.realpath(path))
            if not any(real.is_relative_to(one) for one in folders):
                raise NotAnAdapter(f"{path} is not in lora.allowed_folders")
    try:
        # It checks again what it has opened: links may have changed meanwhile.
        return convert(
            source, model_dir, dtype_of(settings), lora.max_lora_rank, lora.max_adapter_bytes, deadline_s, folders
        )
    except AdapterError as error:
        if isinstance(error.__cause__, OutsideFolders):
            raise NotAnAdapter(f"{source} is not in lora.allowed_folders") from error
        if folders and isinstance(error, NotAnAdapter):
            raise AdapterError(str(error)) from error
        raise


class AdapterRegistry:
    """The adapters by name, as the supervisor tells them, and changes of them."""

    def __init__(self, stage: "Stage[m.GatewayInbox]", limits: RequestLimits, limited_log: LimitedLog) -> None:
        self._stage, self._limits, self._limited_log = stage, limits, limited_log
        self._pending: PendingReplies[bool] = PendingReplies(TIMEOUT_S)
        """Whether the name was taken."""
        self._pool = WorkPool("loading adapters", max_threads=MAX_THREADS, max_waiting=MAX_PENDING)
        self.update(stage.launch.adapters)

    def update(self, adapters: list[m.Adapter]) -> None:
        """These are all adapters that clients may use."""
        self._limits.adapters = {one.name: one for one in adapters}

    async def load(self, body: LoadAdapterBody) -> str:
        """Convert an adapter, and let clients use it. Returns a message. Raises ApiError."""
        self._require_allowed()
        name, folder = body.lora_name, Path(body.lora_path)
        if name == self._limits.model or name in self._limits.aliases:
            raise invalid("lora_name", f"'lora_name' must not be {name!r}, which is the model itself", "invalid_value")
        if name in self._limits.adapters and not body.load_inplace:
            raise _taken(name)
        if len(self._limits.adapters) >= MAX_ADAPTERS:
            raise invalid("lora_name", f"{MAX_ADAPTERS} adapters are loaded already", "invalid_value")
        if not folder.is_absolute():
            raise invalid("lora_path", "'lora_path' must be an absolute path", "invalid_value")
        adapter_id = await self._convert(folder)
        await self._set(m.Adapter(name, adapter_id, str(folder)), is_new=not body.load_inplace)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _convert(self, folder: Path) -> str:
        """Make the file of an adapter. Returns its id. Raises ApiError."""
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                deadline_s = time.monotonic() + LOAD_TIMEOUT_S
                return await self._pool.run(
                    convert_allowed, folder, self._stage.model_dir, self._stage.settings, deadline_s
                )
        except PoolFull:
            raise overloaded(f"{self._pool.num_busy} adapters are being loaded, and {MAX_PENDING} wait") from None
        except TimeoutError:
            message = f"the adapter was not loaded within {LOAD_TIMEOUT_S:g} s"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, "lora_path", "stage_unresponsive") from None
        except NotAnAdapter as error:
            # A client learns nothing about other files of the machine.
            self._limited_log.log(logging.WARNING, "adapter not loaded", why=str(error))
            raise invalid("lora_path", NO_ADAPTER, "invalid_value") from error
        except NotWritten as error:
            self._limited_log.log(logging.ERROR, "adapter not loaded", why=str(error))
            reason = getattr(error.__cause__, "strerror", None)
            message = f"the adapter could not be written into the server's cache: {reason}"
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, "lora_path") from error
        except AdapterError as error:
            raise invalid("lora_path", str(error), "invalid_value") from error

    async def unload(self, body: UnloadAdapterBody) -> str:
        """Let clients use an adapter no longer. Returns a message. Raises ApiError."""
        self._require_allowed()
        if body.lora_name not in self._limits.adapters:
            message = f"the adapter '{body.lora_name[:100]}' does not exist"
            raise ApiError(HTTPStatus.NOT_FOUND, message, "lora_name", "model_not_found")
        await self._set(m.Adapter(body.lora_name, "", ""))
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def handle(self, message: m.Adapters | m.AdapterSet) -> None:
        """A message of the supervisor."""
        if isinstance(message, m.Adapters):
            self.update(message.adapters)
        else:
            self._pending.handle(message.nonce, message.is_taken)

    def _require_allowed(self) -> None:
        if not self._stage.settings.lora.runtime_loading:
            message = "adapters can't be loaded while the server runs: it needs lora.runtime_loading = true"
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="forbidden")

    async def _set(self, adapter: m.Adapter, *, is_new: bool = False) -> None:
        nonce = self._pending.send(lambda nonce, _: self._stage.supervisor.send(m.SetAdapter(nonce, adapter, is_new)))
        if nonce is None:
            raise overloaded("the queue to the supervisor is full")
        replies, _ = await self._pending.collect(nonce)
        if not replies:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE, "Timed out waiting for the supervisor", code="stage_unresponsive"
            )
        if any(replies.values()):  # while this one was converted, another was loaded
            raise _taken(adapter.name)


def _taken(name: str) -> ApiError:
    return invalid("lora_name", f"the adapter {name!r} is loaded already", "invalid_value")
