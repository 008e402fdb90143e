"""A gateway that is replayed from a recording behaves exactly as recorded."""

import json
from pathlib import Path

import httpx
import numpy as np

from pipeline.replay import format as f
from pipeline.runtime import messages as m
from pipeline.stages.gateway.parsing.fill_in import FAMILIES
from tests.runtime.security.test_tls import CERT, KEY
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate
from tests.stages.gateway.replies.choices.scored import token_outputs
from tests.stages.replays import TEXT_FACTS, entries, order, replay_partial, replays_alike


def serve_clients(gate: Gate) -> None:
    stream = gate.post(CHAT | {"stream": True, "stream_options": {"include_usage": True}})
    submit = gate.begin()
    gate.delta(submit, "Hel")
    gate.delta(submit, "lo")
    gate.finish(submit, " there")
    assert "Hel" in stream.result().text
    whole = gate.complete(COMPLETION | {"n": 2, "prompt": ["a", "b"]})
    gate.serve("one")
    gate.serve("two")
    assert whole.result().status_code == 200
    refused = gate.post(CHAT)
    gate.reject(gate.submit(), m.Failure(400, "no"))
    assert refused.result().status_code == 400
    gone = gate.raw(CHAT | {"stream": True})
    submit = gate.begin()
    gate.delta(submit, "late")
    gone.close()
    gate.rig.receive("ingest", m.Abort)
    gate.finish(submit, finish=m.Finish.ABORT)
    gate.rig.until(lambda load: load.num_open_requests == 0)


def test_a_replay_sends_the_same_requests_and_events(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.rec"
    gate = Gate(tmp_path, record=recording)
    with gate:
        serve_clients(gate)
    comparison = replays_alike("gateway", recording)
    assert set(comparison.sent) == {"ingest.0", "schedule.0", "clients"}
    assert replays_alike("gateway", recording, inline=False) == comparison
    text = b"".join(one.body for one in entries(recording) if isinstance(one, f.Sent) and one.peer == "client 1")
    assert text.count(b"data: ") >= 4 and b"[DONE]" in text and b"usage" in text


def test_logprobs_ids_and_vectors_are_replayed(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.rec"
    with Gate(tmp_path, record=recording) as gate:
        top = [(7, -0.5)]
        stream = gate.post(CHAT | {"stream": True, "logprobs": True, "top_logprobs": 1, "return_token_ids": True})
        submit = gate.begin()
        gate.delta(submit, "", token_outputs=token_outputs(-1.0, top=top), pieces=[b"\xf0\x9f", b"a"])
        gate.delta(
            submit, "x", token_outputs=token_outputs(-2.0, top=top), pieces=[b"\x98", b"a"], finish=m.Finish.STOP
        )
        assert stream.result().status_code == 200
        prompt = gate.complete(COMPLETION | {"echo": True, "logprobs": 0, "max_tokens": 0})
        submit = gate.submit()
        gate.accept(submit, pieces=[b"H", b"i"])
        gate.delta(submit, "no", prompt=(0, token_outputs(-2.0), []), finish=m.Finish.STOP)
        assert prompt.result().status_code == 200
        for is_stream in (False, True):
            body = {"token_ids": [1], "sampling_params": {"prompt_logprobs": None}, "stream": is_stream}
            ids = gate.post(body, "/inference/v1/generate")
            gate.serve()
            assert ids.result().status_code == 200
            message = gate.post(CHAT | {"max_tokens": 9, "stream": is_stream}, "/v1/messages")
            gate.serve()
            assert message.result().status_code == 200
            line = gate.post(CHAT | {"stream": is_stream, "logprobs": True}, "/api/chat")
            submit = gate.begin()
            gate.delta(submit, "x", logprobs=[-2.0], pieces=[b"x"], finish=m.Finish.STOP)
            assert line.result().status_code == 200
        vector = gate.post({"model": "tiny", "input": "Hi"}, "/v1/embeddings")
        gate.delta(gate.begin(), "", token_outputs=np.ones(8, "<f4").tobytes(), finish=m.Finish.LENGTH)
        assert vector.result().status_code == 200
        gate.rig.until(lambda load: load.num_open_requests == 0)
    comparison = replays_alike("gateway", recording)
    assert set(comparison.sent) == {"ingest.0", "schedule.0", "clients"}
    replies = [one.body for one in entries(recording) if isinstance(one, f.Sent) and one.peer.startswith("client ")]
    for words in (
        b"top_logprobs",
        b"text_offset",
        b"token_ids",
        b"embedding",
        b"stop_reason",
        b"message_stop",
        b"done_reason",
    ):
        assert any(words in one for one in replies), words


def test_other_apis_are_replayed(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.rec"
    added = [{"id": i, "content": text, "special": True} for i, text in enumerate(FAMILIES[0][:3])]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    with Gate(tmp_path, record=recording) as gate:
        vectors = gate.post({"model": "tiny", "input": ["a", "b"]}, "/api/embed")
        for _ in range(2):
            gate.delta(gate.begin(), "", token_outputs=np.ones(8, "<f4").tobytes(), finish=m.Finish.LENGTH)
        assert len(vectors.result().json()["embeddings"]) == 2
        vector = gate.post({"model": "tiny", "prompt": "a"}, "/api/embeddings")
        gate.delta(gate.begin(), "", token_outputs=np.ones(8, "<f4").tobytes(), finish=m.Finish.LENGTH)
        assert vector.result().status_code == 200
        for is_stream in (False, True):
            for path, body in (
                ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
                ("/api/generate", {"model": "tiny", "prompt": "a"}),
                ("/invocations", {"prompt": "a"}),
            ):
                reply = gate.post(body | {"stream": is_stream}, path)
                gate.serve()
                assert reply.result().status_code == 200
        assert gate.post({"model": "tiny"}, "/api/chat").result().json()["done_reason"] == "load"
        gate.rig.until(lambda load: load.num_open_requests == 0)
    replays_alike("gateway", recording)
    replies = [one.body for one in entries(recording) if isinstance(one, f.Sent) and one.peer.startswith("client ")]
    for words in (b"embeddings", b'"embedding"', b"stop_type", b"response", b"text_completion"):
        assert any(words in one for one in replies), words


def test_a_replay_needs_no_certificate(tmp_path: Path) -> None:
    recording, files = tmp_path / "gateway.rec", (tmp_path / "cert.pem", tmp_path / "key.pem")
    for file, source in zip(files, (CERT, KEY), strict=True):
        file.write_bytes(Path(source).read_bytes())
    with Gate(tmp_path, record=recording, ssl_certfile=str(files[0]), ssl_keyfile=str(files[1])) as gate:
        with httpx.Client(base_url=gate.url.replace("http:", "https:"), verify=False) as client:
            reply = gate.do(client.post, "/v1/chat/completions", json=CHAT)
            gate.serve()
            assert reply.result().status_code == 200
        gate.rig.until(lambda load: load.num_open_requests == 0)
    for file in files:
        file.unlink()
    replays_alike("gateway", recording)


def test_lookups_and_aborts_are_replayed(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.rec"
    with Gate(tmp_path, record=recording) as gate:
        prompt_only = gate.post({"prompt": "x"}, "/tokenize")
        gate.accept(gate.submit())
        assert prompt_only.result().status_code == 200
        stream = gate.post(CHAT | {"stream": True, "request_id": "mine"})
        submit = gate.begin()
        body = {"request_ids": ["mine", "other"]}
        assert gate.client.post("/abort_requests", json=body).json() == {"num_aborted": 1, "num_unknown": 1}
        gate.rig.receive("schedule", m.Abort)
        gate.finish(submit, finish=m.Finish.ABORT)
        assert '"finish_reason":"abort"' in stream.result().text
        gate.rig.until(lambda load: load.num_open_requests == 0)
    replays_alike("gateway", recording)
    sent = [one.body for one in entries(recording) if isinstance(one, f.Sent)]
    assert sum(b"abort" in one for one in sent) >= 2


def test_deadlines_and_cache_resets_are_replayed(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.rec"
    with Gate(tmp_path, record=recording) as gate:
        for text in ("", "so far"):
            stream = gate.post(CHAT | {"stream": True, "timeout_s": 0.2})
            submit = gate.begin()
            if text:
                gate.delta(submit, text)
            gate.rig.receive("schedule", m.Abort)
            gate.finish(submit, finish=m.Finish.ABORT)
            assert stream.result().status_code == (200 if text else 504)
        reset = gate.do(gate.client.post, "/reset_prefix_cache")
        question = gate.rig.receive("schedule", m.ResetPrefixCache)
        gate.rig.send(m.PrefixCacheReset(0, question.nonce, 3), "detokenize.0")
        assert reset.result().json() == {"num_blocks": 3}
        gate.rig.until(lambda load: load.num_open_requests == 0)
    replays_alike("gateway", recording)
    sent = [one.body for one in entries(recording) if isinstance(one, f.Sent)]
    assert sum(b"\xa5abort" in one for one in sent) >= 4
    assert sum(b"reset_prefix_cache" in one for one in sent) == 1


def test_timings_are_replayed_even_with_a_trace(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.rec"
    with Gate(tmp_path, record=recording) as gate:
        gate.rig.send(m.Trace(1, 60.0))
        for body in ({"stream": True}, {"n": 2}):
            reply = gate.post(CHAT | body | {"timings": True})
            gate.serve("Hello")
            assert '"hops"' in reply.result().text
        assert gate.client.get("/version").status_code == 200
        gate.rig.until(lambda load: load.num_open_requests == 0)
        gate.rig.send(m.TakeTrace(2))
        gate.rig.load()
    replays_alike("gateway", recording)
    replies = [one.body for one in entries(recording) if isinstance(one, f.Sent) and one.peer.startswith("client")]
    assert sum(b'"hops"' in one for one in replies) == 2


def test_requests_from_before_a_recording_are_excluded(tmp_path: Path) -> None:
    recording = tmp_path / "late.rec"
    with Gate(tmp_path) as gate:
        early = gate.post(CHAT | {"stream": True})
        submit = gate.begin()
        gate.delta(submit, "before")
        gate.rig.load()
        gate.rig.send(order(recording, TEXT_FACTS))
        assert gate.rig.receive("supervisor", m.Answer).error == ""
        gate.rig.load()
        gate.rig.load()
        gate.finish(submit, " and after")
        assert early.result().text.count("[DONE]") == 1
        serve_clients(gate)
    replayed = replay_partial("gateway", recording)
    assert replayed.counts["answers about earlier requests"] == 1
    assert replayed.counts["events of earlier requests"] >= 2
    sent = [one for one in entries(recording.with_suffix(".out0")) if isinstance(one, f.Sent)]
    assert sum(b"submit" in one.body for one in sent) == 5
    assert not any(b"before" in one.body for one in sent)
