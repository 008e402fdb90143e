"""HTTP cases: a case depends on its number, the seed and the API description alone."""

import random
import urllib.parse
from collections.abc import Mapping
from typing import Any

import msgspec

from tools.fuzz_api import mutations
from tools.fuzz_api.values import Values, cheap

IDS = ("resp_1", "resp_" + "a" * 64, "x", "..", "a b", "%00", "\u202e")
QUERY_VALUES = ("true", "false", "0", "1", "-1", "9" * 30, "text", "json", "", "\x00", "desc")


class Case(msgspec.Struct):
    """A request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def encoded(self) -> bytes:
        """Its bytes, without chunks."""
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: localhost"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if self.body or self.method == "POST":
            lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join([*lines, "\r\n"]).encode("latin-1", "replace") + self.body


class Cases:
    """Makes the cases of a server, from its description."""

    def __init__(self, description: Mapping[str, Any], seed: int) -> None:
        self._seed = seed
        self._schemas = description["components"]["schemas"]
        self._operations = [
            (method.upper(), path, operation)
            for path, operations in description["paths"].items()
            for method, operation in operations.items()
        ]
        self._weights = [4 if "requestBody" in operation else 1 for _, _, operation in self._operations]

    def case(self, number: int) -> Case:
        rng = random.Random(f"{self._seed}:{number}")
        ((method, path, operation),) = rng.choices(self._operations, self._weights)
        target = path.replace("{response_id}", urllib.parse.quote(rng.choice(IDS)))
        target = target.replace("{model}", urllib.parse.quote(rng.choice(("tiny", "tiny:latest", "a/b", "🙂"))))
        query = {
            one["name"]: rng.choice(QUERY_VALUES)
            for one in operation.get("parameters", ())
            if one["in"] == "query" and rng.random() < 0.6
        }
        if query:
            target += "?" + urllib.parse.urlencode(query)
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if content is None:
            body = b"" if rng.random() < 0.8 else mutations.spoiled({}, rng)
            data, headers = mutations.coded(body, rng) if body else (b"", {})
            return Case(method, target, headers, data)
        value = Values(self._schemas, rng).of(content["schema"])
        if "example" in content and rng.random() < 0.6:  # more of these are valid
            value = content["example"] | dict(rng.sample(list(value.items()), min(len(value), rng.randint(0, 2))))
        data, headers = mutations.coded(mutations.spoiled(cheap(value), rng), rng)
        return Case(method, target, headers, data)


UNREAD = ("invalid_http", "too_large", "unsupported_encoding")
"""Codes of errors of a head that could not be read: its path is not known, so they have OpenAI's form."""


def form_problem(path: str, body: Any) -> str:
    """What is wrong with the body of an error of this path; empty if it has the form of its API."""
    if isinstance(body, dict) and isinstance(body.get("error"), dict) and body["error"].get("code") in UNREAD:
        path = ""
    if path.startswith("/api/"):
        is_right = isinstance(body, dict) and set(body) == {"error"} and isinstance(body["error"], str)
    elif path == "/v1/messages" or path.startswith("/v1/messages/"):
        is_right = (
            isinstance(body, dict)
            and body.get("type") == "error"
            and {"type", "message"} <= set(body.get("error", ()))
            and isinstance(body["error"]["message"], str)
        )
    else:
        error = body.get("error") if isinstance(body, dict) else None
        is_right = isinstance(error, dict) and set(error) == {"message", "type", "param", "code"}
        is_right = is_right and isinstance(error["message"], str) and bool(error["message"])  # type: ignore[index]
    return "" if is_right else f"the error has another form: {str(body)[:200]}"
