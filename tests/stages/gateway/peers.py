"""A client of the ZeroMQ door that says what a test wants it to say."""

import time
from types import TracebackType
from typing import Any

import msgspec
import zmq

from pipeline.client import protocol as p
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import Gate

HELLO = p.Hello(1, 1, "a test")


class RawPeer:
    """A DEALER. A context manager; entering it connects, leaving it hangs up."""

    def __init__(self, gate: Gate | str, *, receive_bound: int = 1000, hello: bool = True) -> None:
        address = gate if isinstance(gate, str) else f"ipc://@pipeline/{gate.address[1]}/door"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, receive_bound)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._decoder: msgspec.msgpack.Decoder[p.ServerMessage] = msgspec.msgpack.Decoder(p.ServerMessage)
        self.socket.connect(address)
        if hello:
            self.say(HELLO)
            self.welcome: p.Welcome = self.hear(p.Welcome)

    def say(self, *frames: Any) -> None:
        """Send a message: structs are encoded, bytes go as they are, several are frames of one message."""
        data = [frame if isinstance(frame, bytes) else msgspec.msgpack.encode(frame) for frame in frames]
        self.socket.send_multipart(data)

    def generate(self, request_id: int = 1, prompt: str = "Hi", num_credits: int = 100, **params: Any) -> None:
        message = p.Generate(request_id, "", p.TextPrompt(prompt), p.Params(**params), num_credits)
        self.say(message)

    def hear(self, what: Any = None, timeout_s: float = PATIENCE_S) -> Any:
        """The next message, which must be of type `what`."""
        assert self.socket.poll(timeout_s * 1000), f"no {what} came"
        message = self._decoder.decode(self.socket.recv())
        assert what is None or isinstance(message, what), message
        return message

    def hears_nothing(self, while_s: float = 0.1) -> bool:
        return not self.socket.poll(while_s * 1000)

    def is_still_served(self) -> bool:
        """Whether a ping is answered, after all that was said before."""
        self.say(p.Ping(77))
        return bool(self.hear(p.Pong) == p.Pong(77))

    def is_hung_up(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait until the server has ended the connection."""
        return bool(self._monitor.poll(timeout_s * 1000))

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()
        self._context.term()


def until(condition: Any, what: str, timeout_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.005)
