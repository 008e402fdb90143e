"""Clients with different API keys cannot abort each other's requests or observe them through the prefix cache."""

import contextlib
import json
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.client import protocol as p
from pipeline.runtime import messages as m
from pipeline.runtime.security.api_keys import Keys, scoped_salt
from tests.stages.gateway.admin.test_abort_requests import counts, play_abort
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, free_port, locked
from tests.stages.gateway.peers import RawPeer
from tests.stages.replays import entries, replays_alike
from tests.zmq_requests import generate


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def post(gate: Gate, key: str | None, body: Any = CHAT, name: str = "mine") -> "Future[Any]":
    headers = bearer(key) | {"X-Request-Id": name}
    return gate.do(gate.client.post, "/v1/chat/completions", content=json.dumps(body), headers=headers)


def abort(gate: Gate, key: str | None, *names: str) -> dict[str, int]:
    result = gate.client.post("/abort_requests", json={"request_ids": names}, headers=bearer(key))
    assert result.status_code == 200
    found: dict[str, int] = result.json()
    return found


def salt_of(gate: Gate, key: str | None, **fields: Any) -> str:
    """The cache salt that a request is submitted with."""
    response = post(gate, key, CHAT | fields)
    submit = gate.serve()
    assert response.result().status_code == 200
    return submit.options.cache_salt


class TestScopes:
    def test_each_key_has_its_own_scope_in_all_gateways(self) -> None:
        keys = Keys.of([KEY, SECOND])
        fd = keys.share()
        again = Keys.inherited(fd)
        os.close(fd)
        assert keys.scope_of(KEY) == again.scope_of(KEY)
        assert len({keys.scope_of(KEY), keys.scope_of(SECOND), Keys.of([KEY]).scope_of(KEY)}) == 3
        assert [keys.scope_of(shown) for shown in (None, "", "x", f"{KEY}x")] == [None] * 4
        assert KEY not in str(keys.scope_of(KEY))

    def test_no_client_salt_leads_out_of_its_scope(self) -> None:
        ours, theirs = (str(Keys.of([KEY]).scope_of(KEY)) for _ in range(2))
        salts = ["", "a", "b", ours, theirs, scoped_salt(theirs, ""), scoped_salt(theirs, "a"), theirs + "a"]
        assert len({scoped_salt(scope, salt) for scope in (ours, theirs) for salt in salts}) == 2 * len(salts)
        assert [scoped_salt("", salt) for salt in salts] == salts


class TestPrefixCache:
    def test_each_key_has_its_own_prefix_cache(self, tmp_path: Path) -> None:
        with locked(tmp_path) as gate:
            first = salt_of(gate, KEY)
            assert first and salt_of(gate, KEY) == first != salt_of(gate, SECOND)
            salted = salt_of(gate, KEY, cache_salt="a")
            assert salt_of(gate, KEY, cache_salt="a") == salted
            assert len({first, salted, salt_of(gate, SECOND, cache_salt="a"), salt_of(gate, KEY, cache_salt="b")}) == 4
            assert first not in (salt_of(gate, SECOND, cache_salt=first), salt_of(gate, KEY, cache_salt=first))

    def test_the_prefix_cache_can_be_shared(self, tmp_path: Path) -> None:
        with locked(tmp_path, share_prefix_cache=True) as gate:
            assert [salt_of(gate, key) for key in (KEY, SECOND)] == ["", ""]
            assert [salt_of(gate, key, cache_salt="a") for key in (KEY, SECOND)] == ["a", "a"]

    def test_without_keys_salts_are_unchanged(self, gate: Gate) -> None:
        assert (salt_of(gate, None), salt_of(gate, None, cache_salt="a")) == ("", "a")

    def test_a_key_has_the_same_salt_over_zeromq(self, tmp_path: Path) -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        with locked(tmp_path, zmq=address) as gate:
            of_http = {key: salt_of(gate, key) for key in (KEY, SECOND)}
            for key, salt in of_http.items():
                with RawPeer(address, hello=False) as peer:
                    peer.send(p.Hello(2, 2, "a test", key))
                    peer.receive(p.Welcome)
                    peer.generate()
                    assert gate.serve().options.cache_salt == salt

    def test_the_ipc_listener_accepts_a_key_too(self, tmp_path: Path) -> None:
        with locked(tmp_path) as gate:
            own = salt_of(gate, KEY)
            for shown, salt in ((None, ""), (KEY, own), (f"{KEY}x", "")):
                with RawPeer(gate, hello=False) as peer:
                    peer.send(p.Hello(2, 2, "a test", shown))
                    peer.receive(p.Welcome)
                    peer.generate()
                    assert gate.serve().options.cache_salt == salt


class TestAborts:
    def test_aborts_do_not_reach_requests_of_another_key(self, tmp_path: Path) -> None:
        with locked(tmp_path) as gate:
            response = post(gate, KEY)
            submit = gate.begin()
            assert abort(gate, SECOND, "mine", "chatcmpl-mine", "never") == counts(0, 3)
            assert gate.rig.nothing("schedule", 0)
            assert abort(gate, KEY, "mine", "never") == counts(1, 1)
            play_abort(gate, submit)
            assert response.result().json()["choices"][0]["finish_reason"] == "abort"

    def test_aborts_distinguish_requests_with_the_same_name(self, tmp_path: Path) -> None:
        with locked(tmp_path) as gate:
            first = post(gate, KEY)
            submit = gate.begin()
            second = post(gate, SECOND)
            another = gate.begin()
            assert abort(gate, SECOND, "mine") == counts(1, 0)
            play_abort(gate, another)
            assert second.result().json()["choices"][0]["finish_reason"] == "abort"
            assert abort(gate, SECOND, "mine") == counts(0, 1)
            gate.finish(submit, "Hello")
            assert first.result().json()["choices"][0]["finish_reason"] == "stop"

    def test_aborts_reach_a_keys_requests_over_zeromq(self, tmp_path: Path) -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        with locked(tmp_path, zmq=address) as gate, RawPeer(address, hello=False) as peer:
            peer.send(p.Hello(2, 2, "a test", KEY))
            peer.receive(p.Welcome)
            peer.send(generate(1, "Hi", name="mine", credits=100))
            submit = gate.begin()
            assert abort(gate, SECOND, "mine") == counts(0, 1)
            assert gate.rig.nothing("schedule", 0)
            assert abort(gate, KEY, "mine") == counts(1, 0)
            play_abort(gate, submit)

    def test_aborts_keep_their_scope_in_other_gateways(self, tmp_path: Path) -> None:
        gate = Gate(tmp_path, siblings=1)
        keys = Keys.of([KEY, SECOND])
        keys_fd = keys.share()
        gate.rig.launch = msgspec.structs.replace(gate.rig.launch, keys_fd=keys_fd)
        with contextlib.closing(os.fdopen(keys_fd, "rb")), gate:
            answer = gate.do(abort, gate, KEY, "there")
            question = gate.rig.receive("gateway.1", m.AbortRequests)
            assert (question.names, question.scope) == (["there"], keys.scope_of(KEY))
            gate.rig.send(m.RequestsAborted(1, question.nonce, [0]), "gateway.1")
            assert answer.result() == counts(1, 0)

            response = post(gate, KEY)
            submit = gate.begin()
            for scope in (keys.scope_of(SECOND) or "", ""):
                gate.rig.send(m.AbortRequests(1, 7, ["mine"], scope), "gateway.1")
                assert gate.rig.receive("gateway.1", m.RequestsAborted) == m.RequestsAborted(0, 7, [])
            assert gate.rig.nothing("schedule", 0)
            gate.rig.send(m.AbortRequests(1, 8, ["mine"], keys.scope_of(KEY) or ""), "gateway.1")
            assert gate.rig.receive("gateway.1", m.RequestsAborted) == m.RequestsAborted(0, 8, [0])
            play_abort(gate, submit)
            assert response.result().status_code == 200


@pytest.mark.parametrize("share", [False, True])
def test_recordings_contain_the_scopes(tmp_path: Path, share: bool) -> None:
    recording = tmp_path / "gateway.rec"
    with locked(tmp_path, record=recording, share_prefix_cache=share) as gate:
        salt = salt_of(gate, KEY, cache_salt="a")
        response = post(gate, KEY)
        submit = gate.begin()
        assert abort(gate, SECOND, "mine") == counts(0, 1)
        assert abort(gate, KEY, "mine") == counts(1, 0)
        play_abort(gate, submit)
        assert response.result().status_code == 200
        gate.rig.until(lambda load: load.num_open_requests == 0)
    comparison = replays_alike("gateway", recording)
    assert "ingest.0" in comparison.sent
    assert salt.encode() in b"".join(getattr(one, "body", b"") for one in entries(recording))


def test_lists_and_ids_are_salted_too(tmp_path: Path) -> None:
    with locked(tmp_path) as gate:
        salt = salt_of(gate, KEY)
        gate.client.headers.update(bearer(KEY))
        several = gate.complete(COMPLETION | {"prompt": ["a", "b"]})
        assert [gate.serve().options.cache_salt for _ in range(2)] == [salt, salt]
        ids = gate.post({"token_ids": [1], "sampling_params": {}}, "/inference/v1/generate")
        assert gate.serve().options.cache_salt == salt
        assert (several.result().status_code, ids.result().status_code) == (200, 200)
        rendered = gate.post(CHAT | {"cache_salt": "a"}, "/v1/chat/completions/render")
        gate.accept(gate.submit())
        assert rendered.result().json()["cache_salt"] == "a"


def test_ingest_learns_whose_a_prompt_is_but_not_the_scope(tmp_path: Path) -> None:
    """It divides its time among keys. With the scope, it could compute salts."""

    def scope_id_of(gate: Gate, key: str | None) -> str:
        response = post(gate, key)
        submit = gate.serve()
        assert response.result().status_code == 200
        return submit.scope_id

    with locked(tmp_path) as gate:
        keys = Keys.inherited(gate.rig.launch.keys_fd)
        ids = [scope_id_of(gate, key) for key in (KEY, SECOND, KEY)]
        assert ids[0] == ids[2] != ids[1] and all(ids)
        assert not {keys.scope_of(KEY), keys.scope_of(SECOND)} & set(ids)
    with Gate(tmp_path) as gate:
        assert scope_id_of(gate, None) == ""
