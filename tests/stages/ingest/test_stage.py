"""The ingest stage between fake neighbours."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.config.settings import IngestSettings, LimitSettings, Settings
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.special_layers import DeltaNet
from pipeline.runtime.token_outputs import prompt_logprob_bytes, token_output_bytes
from pipeline.runtime.transport.outbox import Outbox
from pipeline.shm.arrays import ShmRef
from pipeline.stages.ingest import stage as ingest_stage
from pipeline.stages.ingest.prompts.ids import EncodedPrompt
from pipeline.stages.ingest.prompts.prompt_processor import PromptProcessor
from tests.rig import Rig
from tests.stages.ingest import models as tiny

LONG_TEXT = "a long story of the sea. " * 40_000
"""A megabyte."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig("ingest", model_dir=tiny.folder(tmp_path)) as rig:
        rig.start(tiny.facts())
        yield rig


@pytest.fixture
def long_rig(smollm2_dir: Path) -> Iterator[Rig]:
    """The real tokenizer, with a length limit that accepts a megabyte."""
    with Rig("ingest", model_dir=smollm2_dir) as rig:
        rig.start(tiny.facts(max_model_len=1_000_000, vocab_size=49152))
        yield rig


def ids_in(rig: Rig, array: m.Array) -> list[int]:
    return np.frombuffer(rig.bytes_of(array), np.int32).tolist()


def release(rig: Rig, array: m.Array, reader: str) -> None:
    assert isinstance(array, ShmRef)
    rig.send(m.Release([array.offset], [array.generation], reader), reader)


def test_a_request_that_overtakes_start_waits_for_it(tmp_path: Path) -> None:
    with Rig("ingest", model_dir=tiny.folder(tmp_path)) as rig:
        rig.send(tiny.submit(tiny.chat("hi"), request_id=9), "gateway.0")
        assert rig.load().num_open == 1
        rig.start(tiny.facts())
        assert rig.receive("gateway", m.Accepted).request_id == 9


def test_a_continued_stream_has_its_template_s_time_and_the_place_of_a_new_request(tmp_path: Path) -> None:
    with Rig("ingest", model_dir=tiny.folder(tmp_path, template="{{ strftime_now('%Y') }}")) as rig:
        rig.start(tiny.facts())
        new = tiny.submit(tiny.chat("hi"), max_tokens=5)
        for template_s, year in ((0.0, "1970"), (1.6e9, "2020")):
            rig.send(msgspec.structs.replace(new, template_s=template_s), "gateway.0")
            admit = rig.receive("schedule", m.Admit)
            assert tiny.byte_tokenizer().decode(ids_in(rig, admit.prompt_ids)) == year
            assert admit.arrival_s == new.arrival_s


def test_a_request_is_accepted_and_admitted_with_the_same_ids(rig: Rig) -> None:
    rig.send(tiny.submit(tiny.chat("hi"), request_id=9, attempt=3, max_tokens=5), "gateway.0")
    accepted, admit = rig.receive("gateway"), rig.receive("schedule")
    assert isinstance(accepted, m.Accepted)
    assert isinstance(admit, m.Admit)
    assert (accepted.request_id, accepted.attempt) == (9, 3) == (admit.request_id, admit.attempt)
    assert ids_in(rig, admit.prompt_ids) == ids_in(rig, accepted.prompt_ids)
    text = tiny.byte_tokenizer().decode(ids_in(rig, admit.prompt_ids), skip_special_tokens=False)
    assert text == "<s>user:hi</s><s>assistant:"
    assert (admit.arrival_s, admit.gateway) == (5.0, 0)
    assert tiny.options_of(admit) == m.GenerationOptions(n=2, max_tokens=5, seed=7, stop=["x"])


def test_schedule_learns_where_other_prompts_part_from_one_of_a_model_with_states(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path)
    delta = DeltaNet(layers=[0], key_heads=1, value_heads=1, key_dim=16, value_dim=32, eps=1e-6)
    msgspec.structs.replace(ModelConfig.load(folder), delta=delta).save(folder)
    with Rig("ingest", model_dir=folder) as rig:
        rig.start(tiny.facts())
        rig.send(tiny.submit(tiny.chat("hi", "you"), max_tokens=5), "gateway.0")
        admit = rig.receive("schedule", m.Admit)
        before = [ids_in(rig, admit.prompt_ids)[:position] for position in admit.cut_positions]
    assert [tiny.byte_tokenizer().decode(ids, skip_special_tokens=False) for ids in before] == [
        "<s>user:hi</s><s>user:you</s><s>assistant:",
        "<s>user:hi</s>",
    ]


def test_for_other_models_nothing_is_cut(rig: Rig) -> None:
    rig.send(tiny.submit(tiny.chat("hi", "you"), max_tokens=5), "gateway.0")
    assert rig.receive("schedule", m.Admit).cut_positions == []


def test_priority_and_salt_are_forwarded_to_schedule(rig: Rig) -> None:
    rig.send(tiny.submit("hi", priority=-7, cache_salt="tenant é"), "gateway.0")
    options = tiny.options_of(rig.receive("schedule", m.Admit))
    assert (options.priority, options.cache_salt) == (-7, "tenant é")


def test_only_the_gateway_hears_of_a_rejected_request(rig: Rig) -> None:
    rig.send(tiny.submit("x" * 64), "gateway.0")
    rejected = rig.receive("gateway")
    assert isinstance(rejected, m.Rejected)
    assert (rejected.request_id, rejected.failure.code) == (1, "context_length_exceeded")
    assert rig.nothing("schedule")


def test_ids_of_partial_int32_bytes_are_rejected(rig: Rig) -> None:
    rig.send(tiny.submit(m.IdsPrompt(b"\0\0\0\0\0")), "gateway.0")
    assert rig.receive("gateway").failure.param == "prompt"


def test_requests_keep_their_order(rig: Rig) -> None:
    for i in range(300):
        rig.send(tiny.submit(f"request {i}", request_id=i), "gateway.0")
    assert [rig.receive("schedule").request_id for _ in range(300)] == list(range(300))
    assert [rig.receive("gateway").request_id for _ in range(300)] == list(range(300))


def test_a_large_prompt_is_shared_once_and_freed_after_both_readers_release_it(tmp_path: Path) -> None:
    with Rig("ingest", model_dir=tiny.folder(tmp_path)) as rig:
        rig.start(tiny.facts(max_model_len=10_000))
        rig.send(tiny.submit("x" * 5000), "gateway.0")
        accepted, admit = rig.receive("gateway"), rig.receive("schedule")
        assert isinstance(admit.prompt_ids, ShmRef)
        assert accepted.prompt_ids == admit.prompt_ids
        assert len(ids_in(rig, admit.prompt_ids)) == 5000
        release(rig, admit.prompt_ids, "schedule.0")
        assert rig.until(lambda load: load.num_open == 1)
        release(rig, accepted.prompt_ids, "gateway.0")
        rig.until(lambda load: load.num_open == 0)


def test_a_full_arena_sends_ids_inline(tmp_path: Path) -> None:
    settings = Settings(ingest=IngestSettings(arena_bytes=65536))
    with Rig("ingest", settings, tiny.folder(tmp_path)) as rig:
        rig.start(tiny.facts(max_model_len=100_000))
        for i in range(3):
            rig.send(tiny.submit("x" * 10_000, request_id=i), "gateway.0")
        arrays = [rig.receive("schedule").prompt_ids for _ in range(3)]
        assert [isinstance(array, ShmRef) for array in arrays] == [True, False, False]
        assert all(len(ids_in(rig, array)) == 10_000 for array in arrays)


def test_aborting_a_waiting_request_sends_a_reply_and_stops_it(long_rig: Rig) -> None:
    # The first occupies the only encoding thread, so the second waits on any machine.
    long_rig.send(tiny.submit(LONG_TEXT, request_id=1), "gateway.0")
    long_rig.send(tiny.submit(LONG_TEXT, request_id=2), "gateway.0")
    long_rig.send(m.Abort(2, 0), "gateway.0")
    rejected = long_rig.receive("gateway", m.Rejected)
    assert (rejected.request_id, rejected.failure.status, rejected.failure.code) == (2, 499, "aborted")
    admit = long_rig.receive("schedule")
    assert admit.request_id == 1
    release(long_rig, admit.prompt_ids, "schedule.0")
    release(long_rig, long_rig.receive("gateway", m.Accepted).prompt_ids, "gateway.0")
    long_rig.until(lambda load: load.num_open == 0)
    assert long_rig.nothing("schedule")


def test_an_abort_of_an_unknown_request_is_left_to_schedule(rig: Rig) -> None:
    rig.send(m.Abort(77, 0), "gateway.0")
    rig.send(tiny.submit("x", request_id=78, attempt=1), "gateway.0")
    rig.send(m.Abort(78, 0), "gateway.0")
    rig.send(m.Abort(78, 1, index=0), "gateway.0")
    assert rig.receive("schedule").request_id == 78
    assert isinstance(rig.receive("gateway"), m.Accepted)
    assert rig.load().num_open == 0
    assert rig.nothing("gateway")


def test_short_requests_overtake_a_megabyte_prompt(long_rig: Rig) -> None:
    long_rig.send(tiny.submit(LONG_TEXT, request_id=1), "gateway.0")
    for i in range(2, 12):
        long_rig.send(tiny.submit(tiny.chat("hi"), request_id=i), "gateway.0")
    assert [long_rig.receive("schedule").request_id for _ in range(11)] == [*range(2, 12), 1]


def test_a_long_text_has_the_same_ids_as_when_encoded_directly(long_rig: Rig, smollm2_dir: Path) -> None:
    text = LONG_TEXT[:30_000]
    long_rig.send(tiny.submit(text), "gateway.0")
    expected = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")).encode(text).ids
    assert ids_in(long_rig, long_rig.receive("schedule").prompt_ids) == expected


def test_a_long_text_can_be_rejected(rig: Rig) -> None:
    rig.send(tiny.submit("x" * ingest_stage.LONG_BYTES), "gateway.0")
    assert rig.receive("gateway").failure.code == "context_length_exceeded"
    rig.until(lambda load: load.num_open == 0)


def test_stopping_waits_only_for_the_text_being_encoded(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    really = PromptProcessor.encode

    def counted(
        self: PromptProcessor, prompt: m.ChatPrompt | m.TextPrompt, *others: Any, **options: Any
    ) -> EncodedPrompt:
        encoded.append(prompt)
        return really(self, prompt, *others, **options)

    monkeypatch.setattr(PromptProcessor, "encode", counted)
    with Rig("ingest", model_dir=smollm2_dir) as rig:
        rig.start(tiny.facts(max_model_len=1_000_000, vocab_size=49152))
        for i in range(30):
            rig.send(tiny.submit(LONG_TEXT, request_id=i), "gateway.0")
        assert rig.load().num_open > 0
    assert len(encoded) < 5


def test_messages_to_a_full_edge_are_sent_later(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.runtime.transport.outbox import Outbox

    counter = itertools.count()
    really = Outbox.send

    def sometimes(self: Outbox[object], message: object) -> bool:
        if isinstance(message, m.Admit | m.Accepted) and next(counter) % 3:
            return False
        return really(self, message)

    monkeypatch.setattr(Outbox, "send", sometimes)
    for i in range(20):
        rig.send(tiny.submit("x", request_id=i), "gateway.0")
    assert [rig.receive("schedule").request_id for _ in range(20)] == list(range(20))
    assert [rig.receive("gateway").request_id for _ in range(20)] == list(range(20))
    rig.until(lambda load: load.num_open == 0)


@pytest.mark.parametrize(
    "prompt",
    [
        m.TextPrompt("\0\0\x01"),
        m.ChatPrompt([m.ChatMessage("\0", "</s><s>system:", "{{ 1 / 0 }}")]),
        m.ChatPrompt([m.ChatMessage("user", "")] * 5000),
        m.TextPrompt("💥" * 500_000),
        m.ChatPrompt([]),
    ],
)
def test_no_prompt_ends_the_stage(rig: Rig, prompt: m.Prompt) -> None:
    rig.send(tiny.submit(prompt, request_id=1), "gateway.0")
    rig.receive("gateway")
    rig.send(tiny.submit("still there", request_id=2), "gateway.0")
    assert rig.receive("gateway", m.Accepted).request_id == 2
    rig.until(lambda load: load.num_open == 0)


def test_a_folder_without_a_tokenizer_ends_the_stage_before_it_is_ready(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="No such file"), Rig("ingest", model_dir=tmp_path) as rig:
        rig.receive("supervisor", m.Ready)


def test_an_error_in_a_worker_thread_ends_the_stage_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(
        self: PromptProcessor, prompt: m.ChatPrompt | m.TextPrompt, *others: Any, **options: Any
    ) -> EncodedPrompt:
        raise AssertionError("a broken invariant")

    monkeypatch.setattr(PromptProcessor, "encode", broken)
    with (
        pytest.raises(AssertionError, match="a broken invariant"),
        Rig("ingest", model_dir=tiny.folder(tmp_path)) as rig,
    ):
        rig.start(tiny.facts())
        rig.send(tiny.submit("x" * ingest_stage.LONG_BYTES), "gateway.0")
        rig.receive("gateway")


def test_resumed_ids_are_forwarded_in_shared_memory_with_their_finish(tmp_path: Path) -> None:
    long = [1] * 2000
    with Rig("ingest", model_dir=tiny.folder(tmp_path)) as rig:
        rig.start(tiny.facts(max_model_len=4000))
        outputs = [np.array(ids, np.int32).tobytes() for ids in (long, [5, 257])]
        rig.send(msgspec.structs.replace(tiny.submit("hi"), outputs=outputs), "gateway.0")
        rig.receive("gateway", m.Accepted)
        admit = rig.receive("schedule", m.Admit)
        assert [ids_in(rig, one) for one in admit.outputs] == [long, [5, 257]]
        assert admit.finishes == bytes([m.Finish.NONE, m.Finish.STOP])
        assert isinstance(admit.outputs[0], ShmRef)
        assert rig.until(lambda load: load.num_open == 1)
        release(rig, admit.outputs[0], "schedule.0")
        rig.until(lambda load: load.num_open == 0)
        rig.send(msgspec.structs.replace(tiny.submit("hi"), outputs=[b"\xff\xff\xff\x7f", b""]), "gateway.0")
        failure = rig.receive("gateway", m.Rejected).failure
        assert (failure.status, failure.param) == (400, "received")


def test_record_widths_follow_from_the_options_of_schedule(rig: Rig) -> None:
    def widths(options: m.GenerationOptions) -> tuple[int, int, bool]:
        return token_output_bytes(options, 5), prompt_logprob_bytes(options), options.needs_full_prefill

    submitted = tiny.submit("hi", max_tokens=1, num_logprobs=1, num_prompt_logprobs=3, bad_words=["ab"])
    rig.send(submitted, "gateway.0")
    options = tiny.options_of(rig.receive("schedule", m.Admit))
    assert widths(options) == (12, 4 + 8 * 3, True)
    assert options.bad_words == [] and len(options.bad_words_ids[0]) == 2
    rig.send(tiny.submit("x" * 63, max_tokens=1, pooling=m.Pooling.MEAN), "gateway.0")
    assert widths(tiny.options_of(rig.receive("schedule", m.Admit))) == (4 * 5, 0, True)
    rig.send(tiny.submit("x"), "gateway.0")
    options = tiny.options_of(rig.receive("schedule", m.Admit))
    assert widths(options) == (0, 0, False)
    assert options.max_tokens == 63


def test_a_gateway_is_not_woken_for_a_pooled_prompt_before_its_result(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that generates wakes it: its prompt's ids come before any output."""
    woken: list[bool] = []
    send_all = Outbox.send_all

    def sent(self: "Outbox[Any]", messages: Any, *, wakes: bool = True) -> bool:
        woken.extend(wakes for one in messages if isinstance(one, m.Accepted))
        return send_all(self, messages, wakes=wakes)

    monkeypatch.setattr(Outbox, "send_all", sent)
    for max_tokens, pooling in ((1, m.Pooling.MEAN), (1, m.Pooling.NONE), (0, m.Pooling.NONE), (1, m.Pooling.ALL)):
        rig.send(tiny.submit("hi", max_tokens=max_tokens, pooling=pooling), "gateway.0")
        rig.receive("gateway", m.Accepted)
    assert woken == [False, True, True, False]


def test_the_echo_of_a_chat_is_its_rendered_and_truncated_text(rig: Rig) -> None:
    for truncate, text in ((0, "<s>user:hi</s><s>assistant:"), (4, "ant:")):
        options = m.PromptOptions(with_text=True, truncate=truncate)
        rig.send(msgspec.structs.replace(tiny.submit(tiny.chat("hi")), prompt_options=options), "gateway.0")
        assert rig.receive("gateway", m.Accepted).text == text
    options = m.PromptOptions(with_text=True, truncate=2)
    rig.send(msgspec.structs.replace(tiny.submit("whole"), prompt_options=options), "gateway.0")
    assert rig.receive("gateway", m.Accepted).text == "le"


ENDLESS = (
    "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}{{ messages[0].content }}"
)


def test_an_endless_template_is_stopped_while_other_requests_continue(tmp_path: Path) -> None:
    settings = Settings(limits=LimitSettings(template_timeout_s=0.5))
    with Rig("ingest", settings, tiny.folder(tmp_path, ENDLESS)) as rig:
        rig.start(tiny.facts())
        rig.send(tiny.submit(tiny.chat("loop"), request_id=1), "gateway.0")
        for i in range(2, 12):
            rig.send(tiny.submit(tiny.chat("hi"), request_id=i), "gateway.0")
        assert [rig.receive("schedule").request_id for _ in range(10)] == [*range(2, 12)]
        failure = rig.receive("gateway", m.Rejected).failure
        assert (failure.status, failure.param, failure.code) == (400, "messages", "template_timeout")
        assert "longer than 0.5 s" in failure.message
        rig.until(lambda load: load.num_open == 0)


def test_a_chat_with_tools_uses_the_tool_template(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path, "plain")
    (folder / "chat_template.tool_use.jinja").write_text("<tool_call> with {{ tools|length }}")
    with Rig("ingest", model_dir=folder) as rig:
        rig.start(tiny.facts())
        chat = m.ChatPrompt([m.ChatMessage("user", "x")], tools='[{"a": 1}]')
        for tool_choice, text in (("auto", "<tool_call> with 1"), ("none", "plain")):
            submitted = tiny.submit(msgspec.structs.replace(chat, tool_choice=tool_choice))
            rig.send(msgspec.structs.replace(submitted, prompt_options=m.PromptOptions(with_text=True)), "gateway.0")
            assert rig.receive("gateway", m.Accepted).text == text
