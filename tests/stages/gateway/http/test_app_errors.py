"""Errors of the routes: their statuses, their formats, and the field that they name."""

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.runtime import messages as m
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate


class TestRejection:
    def test_a_rejection_names_the_field_that_the_client_used(self, gate: Gate) -> None:
        for fields, param in (
            ({"max_completion_tokens": 9}, "max_completion_tokens"),
            ({"max_tokens": 9}, "max_tokens"),
            ({}, "max_tokens"),
        ):
            response = gate.post(CHAT | fields)
            gate.reject(gate.submit(), m.Failure(400, "too many", "max_tokens"))
            assert response.result().json()["error"]["param"] == param

    def test_a_rejection_of_the_only_prompt_has_no_index(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION)
        gate.reject(gate.submit(), m.Failure(400, "too long", "prompt"))
        assert response.result().json()["error"]["param"] == "prompt"


class TestErrors:
    def test_errors_have_the_format_of_openai(self, gate: Gate) -> None:
        result = gate.post(CHAT | {"temperature": 3}).result()
        assert result.status_code == 400
        assert result.headers["Content-Type"].startswith("application/json")
        assert result.json() == {
            "error": {
                "message": "'temperature' must be a number >= 0 and <= 2",
                "type": "invalid_request_error",
                "param": "temperature",
                "code": "invalid_value",
            }
        }

    def test_bad_json_is_400(self, gate: Gate) -> None:
        assert gate.post(b'{"model":').result().status_code == 400

    def test_an_unknown_model_is_404(self, gate: Gate) -> None:
        result = gate.post(CHAT | {"model": "gpt-9"}).result()
        assert (result.status_code, result.json()["error"]["code"]) == (404, "model_not_found")

    @pytest.mark.parametrize("path", ["/v1", "/v1/audio", "/v1/chat"])
    def test_an_unknown_path_is_404(self, gate: Gate, path: str) -> None:
        result = gate.client.get(path)
        assert result.status_code == 404
        assert path in result.json()["error"]["message"]

    def test_a_wrong_method_is_405(self, gate: Gate) -> None:
        result = gate.client.get("/v1/chat/completions")
        assert (result.status_code, result.headers["Allow"]) == (405, "POST")
        assert "GET" in result.json()["error"]["message"]

    def test_an_unreadable_body_is_400_and_not_logged(self, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
        headers = {"Content-Encoding": "gzip"}
        result = gate.client.post("/v1/completions", content=b"not gzip at all", headers=headers)
        assert (result.status_code, result.json()["error"]["type"]) == (400, "invalid_request_error")
        assert result.json()["error"]["message"] == "cannot read the body: Can not decode content-encoding: gzip"
        gate.rig.load()
        assert not [record for record in caplog.records if record.exc_info]

    @pytest.mark.parametrize("encoding", ["foo", "gzip, gzip", "x" * 1000])
    def test_an_unknown_encoding_is_415(self, gate: Gate, encoding: str) -> None:
        result = gate.client.post("/v1/completions", content=b"x", headers={"Content-Encoding": encoding})
        assert (result.status_code, result.json()["error"]["code"]) == (415, "unsupported_encoding")
        assert "gzip, deflate" in result.json()["error"]["message"]
        assert len(result.content) < 500

    def test_an_unknown_expectation_is_417(self, gate: Gate) -> None:
        result = gate.client.post("/v1/completions", content=b"{}", headers={"Expect": "42"})
        assert (result.status_code, result.json()["error"]["type"]) == (417, "invalid_request_error")
        assert "'42'" in result.json()["error"]["message"]

    def test_long_paths_are_not_repeated(self, gate: Gate) -> None:
        for result in (gate.client.get("/" + "x" * 5000), gate.client.post("/v1/models/" + "x" * 5000)):
            assert result.status_code in (404, 405)
            assert len(result.content) < 500

    def test_errors_leave_no_request_open(self, gate: Gate) -> None:
        for body in (CHAT | {"n": 0}, CHAT | {"model": "x"}, b"[", [1]):
            assert 400 <= gate.post(body).result().status_code < 500
        assert gate.rig.load().num_open_requests == 0
        assert gate.rig.nothing("ingest", 0)

    def test_invalid_http_is_400_and_does_not_affect_others(self, gate: Gate) -> None:
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
            b"GET\r\n\r\n",
            b"POST / HTTP/9\r\n\r\n",
        ):
            with socket.create_connection(gate.address, timeout=30) as connection:
                connection.sendall(garbage)
                assert connection.recv(1000).startswith(b"HTTP/1.")
        assert gate.client.get("/version").status_code == 200


class TestTooLargeBody:
    @pytest.fixture
    def gate(self, tmp_path: Path) -> Iterator[Gate]:
        with Gate(tmp_path, max_body_bytes=2000) as gate:
            yield gate

    def test_a_too_large_body_is_413_before_it_is_read(self, gate: Gate) -> None:
        connection = http.client.HTTPConnection(*gate.address, timeout=30)
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Length", str(10**12))
        connection.endheaders()
        with connection.getresponse() as response:
            assert response.status == 413
            assert "2000" in json.loads(response.read())["error"]["message"]
        connection.close()

    def test_a_too_large_body_of_unknown_length_is_413(self, gate: Gate) -> None:
        result = gate.client.post("/v1/completions", content=iter([b" " * 1500, b" " * 1500]))
        assert result.status_code == 413

    def test_the_limit_applies_to_the_decompressed_body(self, gate: Gate) -> None:
        import gzip

        bomb = gzip.compress(b" " * 1_000_000)
        assert len(bomb) < 2000
        result = gate.client.post("/v1/completions", content=bomb, headers={"Content-Encoding": "gzip"})
        assert result.status_code == 413
