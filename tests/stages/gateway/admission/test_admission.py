"""Admission bounds open sequences and tokens, and rejects excess requests at once with Retry-After."""

import time
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.client import protocol as p
from pipeline.config.settings import GatewaySettings, Settings
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.messages import Finish
from pipeline.stages.gateway.admission.admission import Admission
from pipeline.stages.gateway.admission.end_rates import MAX_RETRY_S
from pipeline.stages.gateway.errors import ApiError, Overloaded
from tests.logs import lines_of
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate
from tests.stages.gateway.peers import RawPeer

SOON_S = 0.05
"""Limit of the median time of a rejection: other load of the machine may delay single ones."""


def refusal(admission: Admission, num_sequences: int, num_tokens: int, now_s: float = 0.0) -> Overloaded:
    with pytest.raises(Overloaded) as raised:
        admission.admit(num_sequences, num_tokens, now_s)
    assert (raised.value.status, raised.value.code) == (503, "overloaded")
    return raised.value


class TestLimits:
    def test_sequences_and_tokens_are_bounded(self) -> None:
        admission = Admission(4, 100)
        admission.admit(2, 60, 0.0)
        admission.take(2, 60, 0.0)
        admission.admit(2, 40, 0.0)
        assert not refusal(admission, 3, 1).by_size
        assert "40 of 100 prompt tokens are free" in refusal(admission, 1, 41).message
        assert refusal(admission, 1, 41).by_size
        admission.give(2, 60, 1.0)
        admission.admit(4, 100, 1.0)

    def test_a_single_request_is_admitted_whatever_its_length(self) -> None:
        admission = Admission(4, 100)
        admission.admit(1, 5000, 0.0)
        admission.take(1, 5000, 0.0)
        refusal(admission, 1, 1)
        with pytest.raises(ApiError):
            admission.check_room(0.0)
        admission.give(1, 5000, 0.0)
        admission.check_room(0.0)

    def test_replicas_have_equal_shares(self) -> None:
        settings = Settings(gateway=GatewaySettings(replicas=3, max_open_sequences=10, max_open_tokens=100))
        assert topology.max_open_tokens_of_one(settings) == 33
        assert topology.max_open_tokens_of_one(Settings(gateway=GatewaySettings(replicas=2, max_open_tokens=1))) == 1

    @given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 60), st.integers(1, 60), st.booleans())))
    def test_all_credits_are_returned(self, requests: list[tuple[int, int, int, bool]]) -> None:
        admission = Admission(8, 100)
        open_requests: list[tuple[int, int]] = []
        for num_sequences, guess, num_tokens, ends in requests:
            try:
                admission.admit(num_sequences, guess, 0.0)
            except ApiError:
                assert admission.num_sequences + num_sequences > 8 or admission.num_tokens + guess > 100
            else:
                admission.take(num_sequences, guess, 0.0)
                admission.correct(guess, num_tokens)
                open_requests.append((num_sequences, num_tokens))
            if ends and open_requests:
                admission.give(*open_requests.pop(0), 0.0)
            assert admission.num_sequences == sum(one for one, _ in open_requests) <= 8
            assert admission.num_tokens == sum(one for _, one in open_requests)


class TestEstimate:
    def test_a_prompt_counts_one_token_at_least(self) -> None:
        assert Admission(4, 100).estimate(0, is_computed=True) == 1

    def test_the_estimate_is_bounded_by_the_models_maximum(self) -> None:
        admission = Admission(4, 100)
        admission.max_prompt_tokens = 512
        assert admission.estimate(10_000, is_computed=True) == 512
        assert admission.estimate(10_000, is_computed=False) == 10_000


class TestRetryAfter:
    def test_retry_after_follows_the_recent_rate(self) -> None:
        admission = Admission(10, 10_000)
        admission.take(10, 5000, 0.0)
        for second in range(10):  # a sequence and 100 tokens a second
            admission.give(1, 100, float(second))
            admission.take(1, 100, float(second))
        assert refusal(admission, 1, 1, 10.0).retry_after_s == 1
        assert refusal(admission, 7, 1, 10.0).retry_after_s == 7
        admission.max_tokens = 5000
        admission.num_sequences = 5
        assert refusal(admission, 1, 800, 10.0).retry_after_s == 8

    def test_retry_after_grows_while_no_request_ends(self) -> None:
        admission = Admission(1, 100)
        admission.take(1, 5, 100.0)
        assert [refusal(admission, 1, 1, now_s).retry_after_s for now_s in (100.0, 104.5, 120.0)] == [1, 5, 20]

    def test_retry_after_ignores_idle_time(self) -> None:
        admission = Admission(1, 100)
        admission.take(1, 5, 0.0)
        admission.give(1, 5, 1.0)
        admission.take(1, 5, 10.0)
        assert refusal(admission, 1, 1, 12.0).retry_after_s == 2

    def test_retry_after_is_bounded(self) -> None:
        admission = Admission(1000, 100)
        admission.take(1000, 5, 0.0)
        admission.give(1, 1, 20.0)
        assert refusal(admission, 1000, 1, 20.0).retry_after_s == MAX_RETRY_S


def open_tokens(gate: Gate) -> int:
    num: int = gate.client.get("/load").json()["open_tokens"]
    return num


class TestGateway:
    def test_the_prompts_real_length_replaces_the_estimate(self, tmp_path: Path) -> None:
        with Gate(tmp_path, max_open_tokens=500) as gate:
            response = gate.complete(COMPLETION | {"prompt": "x" * 400, "n": 2})
            submit = gate.submit()
            assert open_tokens(gate) == 100
            gate.accept(submit, 450)
            gate.rig.load()
            load = gate.client.get("/load").json()
            assert load.pop("open_bytes") > 2 * 400 and load.pop("max_open_bytes") == 256 * 1024**2
            assert load.pop("open_media_bytes") == 0 and load.pop("max_open_media_bytes") == 256 * 1024**2
            assert load == {
                "server_load": 1,
                "open_sequences": 2,
                "max_open_sequences": 1024,
                "open_tokens": 450,
                "max_open_tokens": 500,
            }
            refused = gate.complete(COMPLETION | {"prompt": list(range(51))}).result()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert (
                "50 of 500 prompt tokens are free, and this request has about 51" in refused.json()["error"]["message"]
            )
            assert 1 <= int(refused.headers["Retry-After"]) <= MAX_RETRY_S
            assert gate.rig.nothing("ingest", 0), "ingest received it"
            fits = gate.complete(COMPLETION | {"prompt": list(range(50))})
            gate.accept(gate.submit(), 50)
            for index in range(2):
                gate.finish(submit, index=index)
            assert response.result().status_code == 200
            gate.rig.until(lambda load: load.num_open_requests == 1)
            assert open_tokens(gate) == 50
            assert not fits.done()

    @pytest.mark.parametrize("ending", ["rejected", "aborted", "gone"])
    def test_credits_are_returned_after_every_end(self, tmp_path: Path, ending: str) -> None:
        with Gate(tmp_path, max_open_tokens=500) as gate:
            connection = gate.raw(CHAT | {"stream": True})
            submit = gate.submit()
            if ending == "rejected":
                gate.reject(submit, m.Failure(400, "no"))
                assert connection.recv(100)
            else:
                gate.accept(submit, 400)
                connection.close()
                gate.rig.receive("schedule", m.Abort)
                if ending == "aborted":
                    gate.finish(submit, finish=Finish.ABORT)
                else:
                    gate.reject(submit, m.Failure(499, "the request was aborted", code="aborted"), "detokenize.0")
            connection.close()
            gate.rig.until(lambda load: load.num_open_requests == 0)
            assert open_tokens(gate) == 0

    def test_a_single_request_above_the_limit_is_admitted(self, tmp_path: Path) -> None:
        with Gate(tmp_path, max_open_tokens=10) as gate:
            responses = [gate.complete(COMPLETION | {"prompt": [[1] * 300, [2] * 100]})]
            submits = [gate.submit(), gate.submit()]
            assert gate.complete(COMPLETION).result().status_code == 503
            for submit, num_ids in zip(submits, (300, 100), strict=True):
                gate.accept(submit, num_ids)
            for submit in submits:
                gate.finish(submit)
            assert responses[0].result().status_code == 200

    def test_zmq_clients_get_retry_after_too(self, tmp_path: Path) -> None:
        with Gate(tmp_path, max_open_sequences=1) as gate, RawPeer(gate) as peer:
            peer.generate(1)
            gate.begin()
            peer.receive(p.Accepted)
            peer.generate(2)
            failure = peer.receive(p.Failed).failure
            assert (failure.status, failure.code, failure.retry_after_s) == (503, "overloaded", 1)

    def test_a_full_gateway_rejects_requests_without_reading_their_bodies(self, tmp_path: Path) -> None:
        with Gate(tmp_path, max_open_sequences=1) as gate:
            response = gate.post(CHAT)
            submit = gate.begin()
            assert gate.client.post("/v1/chat/completions", content=b"not JSON").status_code == 503
            gate.finish(submit)
            assert response.result().status_code == 200
            gate.rig.until(lambda load: load.num_open_requests == 0)
            assert gate.client.post("/v1/chat/completions", content=b"not JSON").status_code == 400

    def test_many_rejections_are_one_line_of_the_log(self, tmp_path: Path) -> None:
        with lines_of("refused requests with 503") as found:
            with Gate(tmp_path, max_open_sequences=1) as gate:
                response = gate.post(CHAT)
                submit = gate.begin()
                for _ in range(20):
                    assert gate.client.post("/v1/chat/completions", json=CHAT).status_code == 503
                gate.finish(submit)
                assert response.result().status_code == 200
                end = time.monotonic() + PATIENCE_S
                while sum(fields["num"] for fields in found) < 20 and time.monotonic() < end:
                    gate.rig.load()  # heartbeats
            assert sum(fields["num"] for fields in found) == 20
            assert len(found) < 10, "20 requests take less than a few seconds"
            assert (found[0]["num"], found[0]["code"]) == (1, "overloaded")
            assert "the limit of 1 open sequences is reached" in found[0]["why"]

    def test_rejections_are_sent_at_once_while_many_streams_run(self, tmp_path: Path) -> None:
        with Gate(tmp_path, max_open_sequences=64) as gate:
            streams = [gate.raw(CHAT | {"stream": True}) for _ in range(64)]
            try:
                submits = [gate.begin() for _ in streams]
                took_s = []
                for _ in range(20):
                    for submit in submits:
                        gate.delta(submit, "word ")
                    begin_s = time.monotonic()
                    refused = gate.client.post("/v1/chat/completions", json=CHAT)
                    took_s.append(time.monotonic() - begin_s)
                    assert refused.status_code == 503
                assert median(took_s) < SOON_S, took_s
            finally:
                for stream in streams:
                    stream.close()
            for submit in submits:
                gate.finish(submit, finish=Finish.ABORT)
            gate.rig.until(lambda load: load.num_open_requests == 0)
