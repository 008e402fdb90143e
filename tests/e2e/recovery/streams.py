"""A client's stream, whose server starts, stops or fails."""

import json
import threading
import urllib.error
import urllib.request
from typing import Any

from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"


class Stream(threading.Thread):
    """A streaming client that keeps what it receives."""

    def __init__(self, server: Server, max_tokens: int = 2000) -> None:
        super().__init__(daemon=True)
        self._url = server.url
        self._body = {
            "model": MODEL,
            "prompt": "Once upon a time",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        self.events: list[str] = []
        self.status = 0
        self.broken: Exception | None = None
        self.has_text = threading.Event()
        self.is_leaving = False
        """If set, the client disconnects at the next event."""
        self.start()

    def run(self) -> None:
        request = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(self._body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                self.status = response.status
                for line in response:
                    if line.startswith(b"data: "):
                        self.events.append(line[6:].decode().strip())
                        self.has_text.set()
                    if self.is_leaving:
                        return
        except urllib.error.HTTPError as error:
            self.status = error.code
            self.events.append(error.read().decode())
        except OSError as error:
            self.broken = error
        self.has_text.set()

    @property
    def error(self) -> dict[str, Any] | None:
        for event in self.events:
            if event.startswith("{") and "error" in (data := json.loads(event)):
                error: dict[str, Any] = data["error"]
                return error
        return None
