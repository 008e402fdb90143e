"""What the gateway stages of several models share in their process: see models/stage.py."""

from typing import TYPE_CHECKING, Protocol

from pipeline.http_server.access_log import AccessLog
from pipeline.http_server.rejection_log import RejectionLog
from pipeline.stages.gateway.errors import ApiError

if TYPE_CHECKING:
    from pipeline.stages.gateway.stage import GatewayStage


class SharedListener(Protocol):
    """What the gateway stages of several models share: the listeners for clients, and their logs."""

    rejection_log: RejectionLog
    access_log: AccessLog | None

    def fail_streams(self, gateway: "GatewayStage", error: ApiError) -> None:
        """End the streams over ZeroMQ of one model."""

    def server_ends(self) -> bool:
        """Whether all models end, and not one of them."""

    def on_change(self) -> None:
        """A stage takes requests from now on, or no longer."""
