"""The cost of a request in bytes is at least what its structs take in the processes that have them."""

import json
import sys
import time
import tracemalloc
from statistics import median
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.token_outputs import logprob_dtype
from pipeline.stages.detokenize.output_processor import OutputProcessor
from pipeline.stages.gateway.admission import open_bytes
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion
from pipeline.stages.gateway.apis.responses.parsing import parse_response
from pipeline.stages.gateway.apis.responses.reply import reply_fields_of, response_of
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.prompt_request import SequenceOutput
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.replies import large_json, logprobs
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.special_spans import packed
from tests.fakes import FakeExecutor
from tests.rig import raw
from tests.stages.detokenize.test_output_processor import VOCABULARY
from tests.stages.gateway.gate import Gate
from tests.stages.schedule.output.test_token_outputs import LIMITS as SCHEDULE_LIMITS

MODEL = "tiny"
LIMITS = RequestLimits(MODEL, 1024, max_prompt_tokens=8192, vocab_size=50_000)
TEXT = "Some words of a long text. " * 400
FEW_FACTORS = 4
"""The account may be this many times what it bounds, for requests that are more than a few texts."""


def deep_bytes(value: Any, seen: set[int]) -> int:
    """What a value takes with everything that it refers to; each object counts once."""
    if id(value) in seen or isinstance(value, type):
        return 0
    seen.add(id(value))
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(deep_bytes(one, seen) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple):
        return size + sum(deep_bytes(one, seen) for one in value)
    if isinstance(value, msgspec.Struct):
        return size + sum(deep_bytes(getattr(value, name), seen) for name in value.__struct_fields__)
    return size


def submit_of(parsed: ParsedRequest) -> m.Submit:
    return m.Submit(1, 1, 0, 0.0, parsed.prompts[0], parsed.options, list(parsed.outputs), parsed.prompt_options)


def chat(**fields: Any) -> ParsedRequest:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | fields
    return open_bytes.measured(parse_chat(json.dumps(body).encode(), LIMITS))


def completion(**fields: Any) -> ParsedRequest:
    parsed = parse_completion(json.dumps({"model": MODEL, "prompt": "Hi"} | fields).encode(), LIMITS)
    return open_bytes.measured(parsed)


def submitted_bytes(parsed: ParsedRequest) -> int:
    (size,) = open_bytes.submitted_bytes(parsed, open_bytes.fixed_bytes(parsed.options))
    return size


def tools(num: int) -> list[Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": TEXT[:500]}}}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(num)]


def turns(num: int, content: Any) -> list[Any]:
    return [{"role": "user", "content": content}] * num


CALL = {"id": "call_1", "type": "function", "function": {"name": "f0", "arguments": '{"a": 1}'}}
WORST: dict[str, ParsedRequest] = {
    "text": completion(prompt=TEXT * 20),
    "text beyond ASCII": completion(prompt="é" * 10_000),
    "text beyond the BMP": completion(prompt="🦊 ü" * 10_000),
    "ids": completion(prompt=list(range(5000))),
    "short messages": chat(messages=turns(1000, "a")),
    "parts": chat(messages=turns(10, [{"type": "text", "text": f"{i}"} for i in range(300)])),
    "calls": chat(messages=[{"role": "assistant", "content": None, "tool_calls": [CALL] * 50}] * 10 + turns(1, "a")),
    "tools": chat(tools=tools(100), tool_choice="required"),
    "documents": chat(documents=[{"title": "a", "text": TEXT}] * 20),
    "template_kwargs": chat(chat_template_kwargs={"a": TEXT * 5}),
    "logit_bias": completion(logit_bias={str(i): i / 300 for i in range(1024)}),
    "bad_words": completion(bad_words=[f"word {i}" for i in range(1024)]),
    "stop": completion(stop=[f"{i}" + "s" * 200 for i in range(16)]),
    "allowed ids": completion(allowed_token_ids=list(range(20_000))),
    "schema": chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": tools(100)[0]["function"]["parameters"]},
        }
    ),
}


class TestSubmitted:
    @pytest.mark.parametrize("name", WORST)
    def test_it_bounds_what_gateway_and_ingest_have(self, name: str) -> None:
        parsed = WORST[name]
        submit = submit_of(parsed)
        packed = msgspec.msgpack.encode(submit)
        in_ingest = msgspec.msgpack.decode(packed, type=m.Submit)
        taken = deep_bytes(parsed, set()) + deep_bytes(in_ingest, set())
        counted = open_bytes.reply_bytes(parsed) + submitted_bytes(parsed)
        assert counted >= taken, name
        fixed = open_bytes.REQUEST_BYTES + open_bytes.SEQUENCE_BYTES
        options = parsed.options  # schedule and detokenize have them too
        fixed += open_bytes.OPTION_COPIES * open_bytes.options_bytes(options) + open_bytes.stop_bytes(options.stop)
        assert counted - fixed <= FEW_FACTORS * taken, f"{name}: so much is not kept"

    @given(st.lists(st.text(max_size=40), max_size=20), st.text(max_size=200))
    def test_any_texts_are_bounded(self, parts: list[str], document: str) -> None:
        message = m.ChatMessage("user", "".join(parts), parts=parts, reasoning=document)
        prompt = m.ChatPrompt([message] * 3, documents=document)
        packed = msgspec.msgpack.encode(prompt)  # also makes the UTF-8 that texts keep
        again = msgspec.msgpack.decode(packed, type=m.Prompt)
        assert open_bytes.prompt_bytes(prompt) + 200 >= deep_bytes(again, set())

    def test_an_ordinary_chat_costs_microseconds(self) -> None:
        parsed = chat(messages=turns(6, TEXT[:400]), temperature=0.5)
        took_s = []
        for _ in range(50):
            begin_s = time.perf_counter()
            open_bytes.measured(parsed)
            open_bytes.bounded(parsed, 2**28, 64, 8192)
            submitted_bytes(parsed)
            open_bytes.output_cost(parsed, 64)
            took_s.append(time.perf_counter() - begin_s)
        assert median(took_s) < 0.0005, "about 20 us on an idle machine"


class TestEstimate:
    @pytest.mark.parametrize(
        ("prompt", "num_tokens"),
        [
            (m.IdsPrompt(bytes(4 * 17)), 17),
            (m.TextPrompt("x" * 400), 100),
            (m.TextPrompt("é" * 400), 200),
            (m.TextPrompt(""), 0),
            (m.ChatPrompt([m.ChatMessage("user", "x" * 40), m.ChatMessage("user", "é" * 20)]), 20),
        ],
    )
    def test_it_is_exact_for_ids_and_by_bytes_for_text(self, prompt: m.Prompt, num_tokens: int) -> None:
        assert open_bytes.typical_tokens(prompt, open_bytes.utf8_bytes) == num_tokens


class TestManyPrompts:
    def test_options_are_measured_once_for_all_prompts(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        """1,024 prompts with 1,024 words each are a million words, in 10 kB."""
        measured: list[m.GenerationOptions] = []
        options_bytes = open_bytes.options_bytes

        def counted(options: m.GenerationOptions) -> int:
            measured.append(options)
            return options_bytes(options)

        monkeypatch.setattr(open_bytes, "options_bytes", counted)
        reply = gate.complete({"prompt": ["a"] * 200, "bad_words": ["b"] * 200, "max_tokens": 1})
        submits = [gate.begin() for _ in range(200)]
        for submit in submits:
            gate.finish(submit)
        assert reply.result().status_code == 200
        assert len(measured) <= 2, "not for each prompt"

    def test_a_message_that_each_choice_repeats_counts_for_each(self) -> None:
        body = {"messages": turns(1, "a" * 10_000), "add_generation_prompt": False, "echo": True}
        one, many = chat(**body), chat(**body, n=100)
        assert open_bytes.reply_bytes(one) >= 30_000
        assert open_bytes.reply_bytes(many) - open_bytes.reply_bytes(one) >= 99 * 20_000


class TestForm:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("character", ["a", "\x01", '"', "é"])
    def test_it_bounds_what_the_first_events_or_a_reply_repeat(self, stream: bool, character: str) -> None:
        """The request's fields, and two events with them, or a body that is copied once."""
        tool = {"type": "function", "name": "f", "parameters": {"a": character * 3000}}
        body = {"model": MODEL, "input": "Hi", "instructions": character * 10_000, "tools": [tool], "stream": stream}
        nothing: Any = SimpleNamespace(is_on=False, why_off="it is off", check_size=lambda *_: None)
        limits = msgspec.structs.replace(LIMITS, formats=ChatFormats.of("", ChatSettings(tool_call_parser="hermes")))
        parsed = parse_response(json.dumps(body).encode(), limits, nothing, "0").request
        stage: Any = SimpleNamespace(replay_context=ReplayContext(), trace=SimpleNamespace(on=False))
        request = Request(parsed, stage, 1, limits.formats)
        response = response_of(request, "in_progress", [])
        event = len(msgspec.json.encode(response))
        taken = 2 * event + deep_bytes(reply_fields_of(request.parsed), set())
        counted = open_bytes.reply_bytes(parsed)
        assert taken - 2 * 2000 <= counted <= 1.5 * taken, "an event has about 1 kB of its own"


class TestOutput:
    @pytest.mark.parametrize("num_top", [0, 5, 20])
    def test_it_bounds_a_complete_reply_while_it_is_put_together(self, num_top: int) -> None:
        """Output arrives token by token; then it becomes JSON."""
        parsed = chat(logprobs=True, top_logprobs=num_top, max_tokens=800)
        cost = open_bytes.output_cost(parsed, None)
        pieces = {f" word{i}".encode(): f" word{i}".encode() for i in range(1 + num_top)}
        token_outputs = np.zeros(1, logprob_dtype(num_top))
        token_outputs["logprob"] = token_outputs["top_logprobs"] = -12.345678
        token_outputs["top_ids"] = 12345
        tracemalloc.start()
        try:
            sequence, most = SequenceOutput(), 0
            for index in range(800):
                ids = np.array([index], np.int32).tobytes()
                sequence.extend(" word", 5 * index, ids, index, token_outputs.tobytes(), list(pieces.values()))
                most = max(most, open_bytes.output_bytes(cost, sequence))
            grown, _ = tracemalloc.get_traced_memory()
            assert open_bytes.output_bytes(cost, sequence) >= grown - 3000
            tracemalloc.reset_peak()
            each = logprobs.decode_logprobs(range(800), bytes(sequence.token_outputs), sequence.pieces, num_top)
            body = large_json.encode_large(logprobs.packed_of_chat(each, num_top, names_ids=False))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(json.loads(body)["content"]) == 800
        batch = 600 * logprobs.AT_ONCE * (1 + num_top)
        assert most >= peak - batch, "objects of one batch exist beside the reply"
        assert most <= 800 * cost.most_id_bytes, "what was admitted"

    def test_it_bounds_a_complete_reply_of_special_tokens(self) -> None:
        cost = open_bytes.output_cost(chat(max_tokens=5000), None)
        tracemalloc.start()
        try:
            sequence = SequenceOutput()
            for index in range(5000):
                sequence.extend_special_spans(packed(3 * index, 3, 7))
                sequence.extend("<s>", 3 * index, b"\7\0\0\0", index)
            grown, _ = tracemalloc.get_traced_memory()
            assert 5000 * cost.most_id_bytes >= open_bytes.output_bytes(cost, sequence) >= grown - 3000
        finally:
            tracemalloc.stop()

    def test_a_kept_text_is_in_a_few_pieces(self) -> None:
        sequence = SequenceOutput()
        for index in range(5000):
            sequence.extend(f"{index % 10}", index, b"\0\0\0\0", index)
            assert len(sequence.pending) <= 14
        assert sequence.take_text() == "".join(f"{index % 10}" for index in range(5000))


class TestOtherStages:
    @pytest.mark.parametrize("num_top", [-1, 20])
    def test_it_bounds_what_schedule_and_detokenize_have(self, num_top: int) -> None:
        """Until the request is closed: with its output, which a successor of detokenize would get again."""
        num_prompt, num_output, n = 100, 120, 4
        options = m.GenerationOptions(
            n=n, max_tokens=num_output, num_logprobs=num_top, compiled_grammar="g" * 5000, stop=["s" * 50], seed=3
        )
        prompt = np.arange(1, 1 + num_prompt, dtype=np.int32).tobytes()
        submit = m.Submit(2, 1, 0, 0.0, m.IdsPrompt(prompt), options)
        cost = open_bytes.output_cost(completion(stream=True, logprobs=None if num_top < 0 else num_top), None)
        accepted = m.Accepted(2, 1, prompt)
        counted = open_bytes.accepted_bytes(submit, accepted, open_bytes.fixed_bytes(options))
        counted += n * num_output * cost.id_bytes
        scheduler = Scheduler(SchedulerConfig(**SCHEDULE_LIMITS))
        executor, processor = FakeExecutor(SCHEDULE_LIMITS["num_blocks"]), OutputProcessor(VOCABULARY)

        def run(request_id: int) -> None:
            admit = m.Admit(request_id, 1, 0, 0.0, prompt, raw(options))
            for one in scheduler.admit(admit):
                assert isinstance(one, m.Open)
                processor.open(one)
            while (step := scheduler.plan()) is not None:
                scheduler.settle(executor.run(step))
                scheduler.output_buffer.pending()
                scheduler.output_buffer.mark_sent()

        run(1)  # what is allocated once
        scheduler.close(m.Closed(1, 1))
        tracemalloc.start()
        try:
            run(2)
            taken = snapshot()
        finally:
            tracemalloc.stop()
        assert counted >= taken > n * num_output * 4


def snapshot() -> int:
    """Bytes that code of schedule and detokenize has allocated since tracemalloc was started."""
    kept = [tracemalloc.Filter(True, f"*/stages/{stage}/*") for stage in ("schedule", "detokenize")]
    return sum(one.size for one in tracemalloc.take_snapshot().filter_traces(kept).statistics("filename"))


class TestBounded:
    def test_a_request_that_fits_is_not_changed(self) -> None:
        parsed = completion(max_tokens=100, n=4, logprobs=5)
        assert open_bytes.bounded(parsed, 2**28, None, 8192) is parsed

    def test_max_tokens_beyond_the_context_is_left_to_ingest(self) -> None:
        parsed = completion(max_tokens=2**31 - 1)
        assert open_bytes.bounded(parsed, 2**28, None, 8192) is parsed

    def test_a_default_is_lowered_and_a_value_refused(self) -> None:
        lowered = open_bytes.bounded(chat(n=100, logprobs=True, top_logprobs=20), 2**26, None, 8192)
        assert lowered.options.max_tokens is not None and 10 < lowered.options.max_tokens < 8192
        assert lowered.prompt_options.lowers_max_tokens
        size, of_id = open_bytes.most_bytes(lowered, None)
        assert size + of_id * lowered.options.max_tokens <= 2**26 < size + of_id * (lowered.options.max_tokens + 1)
        with pytest.raises(ApiError) as refused:
            open_bytes.bounded(completion(n=100, logprobs=20, max_tokens=8000), 2**26, None, 8192)
        assert (refused.value.status, refused.value.code, refused.value.param) == (
            400,
            "request_too_large",
            "max_tokens",
        )
        assert "lower n, max_tokens, logprobs" in refused.value.message

    def test_the_parallel_samples_of_the_largest_request_fit_by_default(self) -> None:
        """n = 128 with the longest reply of a normal model, and the log probabilities of a large batch."""
        for parsed in (completion(n=128, max_tokens=8192), completion(n=32, max_tokens=1500, logprobs=20)):
            assert open_bytes.bounded(parsed, 3 * 2**26, None, 8192) is parsed
