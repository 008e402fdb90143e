"""`pipeline deploy --servers` relays to a server of several models: the ingress needs to know none of them."""

from pathlib import Path
from typing import Any

from tests.e2e.hosts.test_deploy import Deployment
from tests.e2e.server import Server
from tests.e2e.several.asking import ask, completion, error_of, events_of, states
from tests.e2e.several.conftest import config


def test_requests_choose_a_model_behind_an_ingress(folders: Path) -> None:
    with (
        Server(config=config(folders, "relayed")) as server,
        Server(config=config(folders, "relayed-too")) as other,
        Deployment("--servers", f"{server.url},{other.url}") as deployment,
    ):
        ingress: Any = deployment  # has the `url` of a server
        for model in ("chat", "gpt-x", "other"):
            assert completion(ingress, model)["choices"] == completion(server, model)["choices"]
        vectors = {"model": "vectors", "input": "Hello"}
        assert ask(ingress, "/v1/embeddings", vectors)["data"] == ask(server, "/v1/embeddings", vectors)["data"]
        body = {"model": "chat", "prompt": "Hello", "max_tokens": 8, "stream": True, "temperature": 0}
        assert events_of(ingress, "/v1/completions", body)[-1] == "data: [DONE]"
        assert states(ingress) == dict.fromkeys(("chat", "other", "vectors"), "loaded")
        status, error = error_of(ingress, "/v1/completions", {"model": "none", "prompt": "Hello"})
        assert status == 404 and "none" in error["error"]["message"]
