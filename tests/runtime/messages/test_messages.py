"""Messages between stages: each decodes to what was sent, and no field changes its position."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.settings import Settings
from pipeline.metrics.stats import EdgeCounts, ExecuteCounts, ServerStats, StageCounts, StageStats
from pipeline.runtime import messages as m
from pipeline.runtime.model.kv_groups import KVGroup
from pipeline.runtime.transport.inbox import CONTROL_REQUESTS, MessageDecoder
from pipeline.shm.arrays import ShmRef

SNAPSHOT = Path(__file__).parents[2] / "data" / "wire.json"
"""Sample → its MessagePack in hex. Appending a field extends a line here; any other change breaks older or newer
peers."""

INBOXES: dict[str, Any] = {
    "supervisor": m.SupervisorInbox,
    "gateway": m.GatewayInbox,
    "ingest": m.IngestInbox,
    "schedule": m.ScheduleInbox,
    "execute": m.ExecuteInbox,
    "detokenize": m.DetokenizeInbox,
}

IDS = bytes.fromhex("0100000002000000")
REF = ShmRef("ingest.0", 64, 8192, 3)
OPTIONS = m.GenerationOptions(
    n=2,
    max_tokens=16,
    temperature=0.5,
    top_p=0.25,
    top_k=40,
    min_p=0.125,
    seed=2**64 - 1,
    stop=["\n\n", "é"],
    stop_token_ids=[7, 8],
    ignore_eos=True,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
)
GIVEN_OPTIONS = m.GenerationOptions(
    n=2,
    max_tokens=16,
    temperature=0.5,
    top_p=0.25,
    top_k=40,
    min_p=0.125,
    seed=2**64 - 1,
    repetition_penalty=1.25,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    bias_ids=[3],
    bias_values=[-1.5],
    allowed_ids=IDS,
    bad_words=["bad"],
    min_tokens=4,
    stop=["\n\n", "é"],
    stop_token_ids=[7, 8],
    ignore_eos=True,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    num_logprobs=2,
    num_prompt_logprobs=1,
    with_pieces=True,
    pooling=m.Pooling.MEAN,
    grammar=m.Grammar("regex", "a+", "guided_regex"),
    priority=-3,
    cache_salt="mine",
    logprob_token_ids=[5, 6],
    prediction="as before",
    adapter_id="ab",
    use_beam_search=True,
    length_penalty=1.5,
    early_stopping="never",
    repeats_received=True,
    with_special_spans=True,
)
"""As the gateway sends them."""
COMPLETED_OPTIONS = msgspec.structs.replace(
    GIVEN_OPTIONS,
    bad_words=[],
    bad_words_ids=[[1, 2], [3]],
    grammar=None,
    compiled_grammar='{"grammars": []}',
    prediction="",
    predicted_ids=b"\x07\x00\x00\x00",
)
"""As ingest sends them."""
FIRST = m.FirstTimes(1, 1.5, 2.5, 3.5, 16)
STATS = ServerStats(
    "77-ab",
    77,
    "0.1.0",
    "x",
    "http://127.0.0.1:8000",
    "serving",
    1.5,
    2.5,
    [
        StageStats("ingest.0", 78, "ready", 0, 1.5, 4096, 0.5, 4, None),
        StageStats(
            "execute.0",
            79,
            "late",
            0,
            1.5,
            4096,
            0.5,
            4,
            StageCounts(
                1, 0, [EdgeCounts("schedule.0", 2, 0)], ExecuteCounts(1, 2, 3, 0.5, 0.25, 0.125), 0, 0.5, 3, 64, 0
            ),
            0.5,
        ),
    ],
    100,
    16,
    2048,
)
LOAD = m.ScheduleLoad(1, 2, 3, 4, 5, 12, 6, 7, 8, 9, 10, 1, 2, 3, 4, 5, 7, 8, 6, 2)
FAILURE = m.Failure(400, "too long", "messages", "context_length_exceeded")
REQUEST_ID = 0xFEDCBA9876543210


def packed(struct: msgspec.Struct) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(struct))


SAMPLES: dict[str, msgspec.Struct] = {
    "envelope": m.Envelope("ingest.0", 3),
    "start": m.Start(m.ExecuteFacts(100, 16, 2048, 49152)),
    "start with formats": m.Start(m.ExecuteFacts(100, 16, 2048, 49152, weight_formats="q4_1+q8_0", kv_dtype="int8")),
    "start with groups": m.Start(m.ExecuteFacts(100, 16, 2048, 49152, kv_groups=[KVGroup(0, 3), KVGroup(512, 3)])),
    "start with a back end": m.Start(
        m.ExecuteFacts(
            100, 16, 2048, 49152, backend=m.Backend("avx2", "0123456789ab", "bfloat16", "q8_0", "int12", "int8")
        )
    ),
    "start with states": m.Start(
        m.ExecuteFacts(100, 16, 2048, 49152, num_state_slots=8, num_swap_state_slots=4, state_tokens=9)
    ),
    "start with swap space": m.Start(m.ExecuteFacts(100, 16, 2048, 49152, 50)),
    "ping": m.Ping(5),
    "stop": m.Stop(),
    "count": m.Count(5),
    "record": m.Record(5, "/tmp/x", 1024, 2.5, False, m.ExecuteFacts(100, 16, 2048, 49152), 6.0),
    "end_record": m.EndRecord(5, "/tmp/x"),
    "keep_record": m.KeepRecord(5, "/tmp/x"),
    "record_traffic": m.RecordTraffic(5, bytes(range(32)), 64, 15.0),
    "take_traffic": m.TakeTraffic(5, bytes(range(32)), False),
    "trace": m.Trace(5, 2.5),
    "take_trace": m.TakeTrace(5, True),
    "find_call": m.FindRequest(5, "cmpl-1"),
    "flame": m.Flame(5),
    "end_flame": m.EndFlame(5),
    "reread_keys": m.RereadKeys(5),
    "ask_server_stats": m.AskServerStats(5),
    "stats_answer": m.StatsAnswer(5, STATS),
    "answer": m.Answer(5, packed(FAILURE)),
    "answer with an error": m.Answer(5, error="no such folder"),
    "ready": m.Ready(m.ExecuteFacts(100, 16, 2048, 49152)),
    "ready without facts": m.Ready(),
    "failed": m.StageFailed("no memory"),
    "pong of schedule": m.Pong(5, LOAD),
    "pong of gateway": m.Pong(5, m.GatewayLoad(2)),
    "pong of others": m.Pong(5, m.PlainLoad(2)),
    "pong of execute": m.Pong(5, m.ExecuteLoad(2, 3, 4.5)),
    "ask_health": m.AskHealth(6),
    "drained": m.Drained(),
    "prepared": m.Prepared("/models/x", "x"),
    "accepted": m.Accepted(REQUEST_ID, 1, IDS),
    "accepted with text": m.Accepted(REQUEST_ID, 1, IDS, "hi", ["h", "Ġi"]),
    "accepted with times": m.Accepted(REQUEST_ID, 1, IDS, None, None, 1.5, 2.5),
    "abort_calls": m.AbortRequests(1, 5, ["chatcmpl-1", "mine"]),
    "abort_calls of a scope": m.AbortRequests(1, 5, ["mine"], "5c0be"),
    "calls_aborted": m.RequestsAborted(1, 5, [0]),
    "rejected": m.Rejected(REQUEST_ID, 1, FAILURE),
    "deltas": m.Deltas([REQUEST_ID, 2], [1, 0], [0, 3], ["a", "é"], [0, 9], IDS, [0, 4], [1, 1], [0, 1], [None, "é"]),
    "deltas with times": m.Deltas([1], [0], [0], ["a"], [0], IDS, [0], [2], [0], [None], [FIRST], 4.5, 5.5),
    "deltas with a stop id": m.Deltas([1], [0], [0], [""], [0], IDS, [0], [2], [1], [2]),
    "deltas with special tokens": m.Deltas(
        [1],
        [0],
        [0],
        ["a</s>"],
        [0],
        IDS,
        [0],
        [2],
        [0],
        [None],
        special_indices=[0],
        special_spans=[bytes(12)],
    ),
    "health": m.Health(6, "ok", [m.StageHealth("execute.0", 99, "ready", 1.5)], LOAD),
    "drain": m.Drain(30.0),
    "drain to leave": m.Drain(30.0, is_leaving=True),
    "late_stages": m.LateStages(["execute.0"], [1.5], [0.5]),
    "stage_died": m.StageDied("execute.0", "killed by signal 9"),
    "submit of a chat": m.Submit(
        REQUEST_ID,
        1,
        0,
        1.5,
        m.ChatPrompt([m.ChatMessage("user", "hi", "ada")], False),
        msgspec.structs.replace(OPTIONS, max_tokens=None),
    ),
    "submit of text": m.Submit(REQUEST_ID, 1, 0, 1.5, m.TextPrompt("hi"), OPTIONS),
    "submit of ids": m.Submit(REQUEST_ID, 1, 0, 1.5, m.IdsPrompt(REF), OPTIONS),
    "submit behind ids": m.Submit(REQUEST_ID, 1, 0, 1.5, m.IdsPrompt(REF), OPTIONS, [IDS, b""]),
    "submit of a text to look at": m.Submit(
        REQUEST_ID,
        1,
        0,
        1.5,
        m.TextPrompt("hi"),
        msgspec.structs.replace(OPTIONS, n=1, max_tokens=0),
        prompt_options=m.PromptOptions(False, True, True, True),
    ),
    "submit with a priority": m.Submit(
        REQUEST_ID,
        1,
        0,
        1.5,
        m.TextPrompt("hi"),
        msgspec.structs.replace(OPTIONS, priority=-3, cache_salt="mine"),
    ),
    "abort": m.Abort(REQUEST_ID, 1, 2, m.Finish.STOP),
    "release": m.Release([0, 64], [1, 2], "gateway.0"),
    "admit": m.Admit(REQUEST_ID, 1, 0, 1.5, REF, packed(OPTIONS)),
    "admit behind ids": m.Admit(REQUEST_ID, 1, 0, 1.5, REF, packed(OPTIONS), [IDS, REF], b"\x00\x01"),
    "admit with a priority": m.Admit(
        REQUEST_ID, 1, 0, 1.5, REF, packed(msgspec.structs.replace(OPTIONS, priority=-3, cache_salt="mine"))
    ),
    "admit with cuts": m.Admit(REQUEST_ID, 1, 0, 1.5, REF, packed(OPTIONS), cut_positions=[90, 20]),
    "admit with every option": m.Admit(REQUEST_ID, 1, 0, 1.5, REF, packed(COMPLETED_OPTIONS)),
    "deltas with records": m.Deltas(
        [1],
        [0],
        [0],
        ["a"],
        [0],
        IDS,
        [0],
        [2],
        [4],
        [None],
        token_outputs=[bytes(8)],
        pieces=[[b"a", b"\xc3"]],
        prompt_indices=[0],
        prompt_offsets=[3],
        prompt_logprobs=[bytes(12)],
        prompt_pieces=[[b"b"]],
        errors=["no id is allowed"],
    ),
    "step_result with records": m.StepResult(
        1,
        7,
        IDS,
        IDS,
        REF,
        b"\x00\x04",
        0.25,
        0.5,
        token_outputs=bytes(8),
        prompt_logprobs=REF,
        errors=["no id is allowed"],
    ),
    "settled with records": m.Settled(
        bytes(8),
        IDS,
        IDS,
        REF,
        b"\x00\x04",
        token_outputs=REF,
        prompt_seqs=[7],
        prompt_starts=[3],
        prompt_logprobs=[bytes(12)],
        errors=["no id is allowed"],
    ),
    "submit of a chat with tools": m.Submit(
        REQUEST_ID,
        1,
        0,
        1.5,
        m.ChatPrompt(
            [
                m.ChatMessage("user", "a\nb", None, ["a", "b"]),
                m.ChatMessage("assistant", None, None, None, [m.ToolCall("call_1", "f", "{}")], None, "hm"),
                m.ChatMessage("tool", "1", None, None, [], "call_1"),
            ],
            False,
            True,
            "[{}]",
            "named",
            "f",
            False,
            "[]",
            '{"a": 1}',
        ),
        GIVEN_OPTIONS,
        [],
        m.PromptOptions(truncate=-1, with_pieces=True, truncates_right=True, lowers_max_tokens=True),
    ),
    "accepted with the end of its text": m.Accepted(REQUEST_ID, 1, IDS, tail="<think>\n"),
    "accepted with a grammar": m.Accepted(REQUEST_ID, 1, IDS, compiled_grammar="{}"),
    "release of a reader": m.Release([64], [2**32 + 1], "schedule.0"),
    "peer restarted": m.PeerRestarted(
        3,
        m.PeerInbox("ingest.0", "ipc://@pipeline/x/ingest.0.2", 64),
        2,
        [m.Ring("ingest.0", True, 0, 1, 2, 4096)],
        m.Segment("ingest.0", 3, 65536, False),
    ),
    "peer restarted after a crash": m.PeerRestarted(
        3, m.PeerInbox("execute.0", "ipc://@pipeline/x/execute.0.2", 64), 2, [], crash_counts={REQUEST_ID: 1, 5: 2}
    ),
    "fail_requests": m.FailRequests({REQUEST_ID: f"execute died 3{m.DIED_OF_REQUEST}"}),
    "cleared": m.Cleared([REQUEST_ID, 5]),
    "submit of a continued stream": m.Submit(REQUEST_ID, 1, 0, 1.5, m.IdsPrompt(REF), OPTIONS, [IDS], template_s=0.5),
    "peer removed": m.PeerRestarted(3, m.PeerInbox("ingest.1", "", 64), 2, [], is_removed=True),
    "rescaled": m.Rescaled(4, "ingest", 2),
    "hand_over": m.HandOver(),
    "reconnected": m.Reconnected(3),
    "compiling": m.Compiling(True),
    "accepted with pieces": m.Accepted(REQUEST_ID, 1, IDS, pieces=[b"a", b"\xc3"]),
    "step_result with copies": m.StepResult(1, 7, IDS, IDS, REF, b"\x00\x01", 0.25, 0.5, 0.125),
    "step with copies": m.Step(
        1,
        7,
        IDS,
        [m.RowAdd(3, 4, 1, REF, 5, IDS, packed(OPTIONS), fork_of=2)],
        IDS,
        IDS,
        REF,
        IDS,
        IDS,
        b"\x01\x00",
        IDS,
        REF,
    ),
    "step with groups": m.Step(
        1,
        7,
        IDS,
        [m.RowAdd(3, 4, 1, REF, 5, IDS, packed(OPTIONS), group_blocks=[REF, IDS], first_blocks=[0, 3, 3])],
        IDS,
        IDS,
        REF,
        IDS,
        IDS,
        b"\x01\x00",
        block_groups=b"\x00\x02",
    ),
    "step_result": m.StepResult(1, 7, IDS, IDS, REF, b"\x00\x01", 0.25, 0.5),
    "step_result with drafts": m.StepResult(
        1, 7, IDS, IDS, REF, b"\x00\x01", 0.25, 0.5, num_ids=IDS, num_drafts=REF, draft_s=0.125, draft_pass_s=0.5
    ),
    "step with drafts": m.Step(1, 7, IDS, [], IDS, IDS, REF, IDS, IDS, b"\x01\x00", drafts=REF),
    "step with states": m.Step(
        1,
        7,
        IDS,
        [],
        IDS,
        IDS,
        REF,
        IDS,
        IDS,
        b"\x01\x00",
        state_reads=IDS,
        state_writes=REF,
        state_copy_sources=IDS,
        state_copy_targets=IDS,
    ),
    "use_adapters": m.UseAdapters(1, 7, ["ab", "cd"]),
    "adapters_loaded": m.AdaptersLoaded(1, 7, ["ab"]),
    "adapters": m.Adapters([m.Adapter("sql", "ab", "/a")]),
    "adapter_set": m.AdapterSet(7),
    "set_adapter": m.SetAdapter(7, m.Adapter("sql", "ab", "/a")),
    "prepared with adapters": m.Prepared("/models/x", "x", [m.Adapter("sql", "ab", "/a")]),
    "prepared on two hosts": m.Prepared("/models/x", "x", [], "5c0be"),
    "host_found": m.HostFound("host.0", "b (10.0.0.2)", "tcp://10.0.0.2:1", "k" * 40, ["tcp://10.0.0.2:2"]),
    "host_ended": m.HostEnded("host.0", "the actor died"),
    "host_pong": m.HostPong(5, [m.ChildUsage("execute.0", 4096, 0.5, 4)]),
    "child_started": m.ChildStarted("execute.0", 2, 99),
    "child_ended": m.ChildEnded("execute.0", 2, -9, b"stacks", b"memory"),
    "end_child": m.EndChild("execute.0", 2, True),
    "closed": m.Closed(REQUEST_ID, 1),
    "reset_prefix_cache": m.ResetPrefixCache(1, 7),
    "prefix_cache_reset": m.PrefixCacheReset(1, 7, 64),
    "step": m.Step(1, 7, IDS, [m.RowAdd(3, 4, 1, REF, 5, IDS, packed(OPTIONS))], IDS, IDS, REF, IDS, IDS, b"\x01\x00"),
    "open": m.Open(9, REQUEST_ID, 1, 2, 0, IDS, packed(OPTIONS)),
    "open behind ids": m.Open(9, REQUEST_ID, 1, 2, 0, IDS, packed(OPTIONS), REF, m.Finish.STOP, 20),
    "settled": m.Settled(bytes(8), IDS, IDS, REF, b"\x00\x01"),
    "settled with times": m.Settled(bytes(8), IDS, IDS, REF, b"\x00\x01", [FIRST], 4.5),
    "refuse": m.Reject(REQUEST_ID, 1, 0, FAILURE),
    "launch": m.Launch(
        "ingest",
        0,
        0,
        1,
        "pipeline.stages.ingest.stage",
        Settings(),
        "/models/x",
        "ipc://@pipeline/x/ingest.0.1",
        [m.PeerInbox("schedule.0", "ipc://@pipeline/x/schedule.0.1", 64)],
        [m.Segment("ingest.0", 7, 65536, True)],
        5,
        6,
    ),
}


def inboxes_of(struct: msgspec.Struct) -> list[str]:
    return [name for name, union in INBOXES.items() if type(struct) in get_args(union)]


def plain(value: Any) -> Any:
    """A struct as builtins, so that undecoded parts compare by their bytes."""
    if isinstance(value, msgspec.Raw):
        return bytes(value)
    if isinstance(value, msgspec.Struct):
        return [type(value).__name__, *(plain(getattr(value, name)) for name in value.__struct_fields__)]
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("name", SAMPLES)
def test_a_message_decodes_to_what_was_sent_in_every_inbox(name):
    sample = SAMPLES[name]
    data = msgspec.msgpack.encode(sample)
    for union in [INBOXES[inbox] for inbox in inboxes_of(sample)] or [type(sample)]:
        assert plain(MessageDecoder[Any](union).decode(data)) == plain(sample)


def test_every_member_of_every_inbox_has_a_sample():
    sampled = {type(sample) for sample in SAMPLES.values()}
    for union in INBOXES.values():
        assert set(get_args(union)) <= sampled
    assert set(CONTROL_REQUESTS) <= sampled


@pytest.mark.parametrize(
    ("formats", "quantization"), [("bf16", "none"), ("", "none"), ("q8_0+bf16+q4_1", "q4_1+q8_0"), ("int4", "int4")]
)
def test_the_formats_of_its_weights_say_the_quantization_of_a_model(formats, quantization):
    assert m.ExecuteFacts(1, 16, 2048, 9, weight_formats=formats).quantization == quantization


def test_every_field_of_the_options_is_sampled_with_a_value_other_than_its_default():
    default = m.GenerationOptions()
    for name in m.GenerationOptions.__struct_fields__:
        assert any(getattr(one, name) != getattr(default, name) for one in (GIVEN_OPTIONS, COMPLETED_OPTIONS)), name


def test_every_inbox_accepts_the_supervisor_s_control_messages():
    for name, union in INBOXES.items():
        assert name == "supervisor" or set(get_args(m.Control)) <= set(get_args(union))


@pytest.mark.parametrize("name", INBOXES)
def test_tags_are_unique_in_an_inbox(name):
    tags = [member.__struct_config__.tag for member in get_args(INBOXES[name])]
    assert len(set(tags)) == len(tags)
    assert all(isinstance(tag, str) for tag in tags)


def test_a_tag_means_one_message_everywhere():
    members = {member for union in INBOXES.values() for member in get_args(union)}
    assert len({member.__struct_config__.tag for member in members}) == len(members)


def test_the_encoding_has_not_changed():
    now = {name: msgspec.msgpack.encode(sample).hex() for name, sample in SAMPLES.items() if name != "launch"}
    assert now == json.loads(SNAPSHOT.read_text())


@pytest.mark.parametrize("name", ["deltas", "abort", "settled", "open"])
def test_an_appended_field_is_ignored_by_older_decoders(name):
    sample = SAMPLES[name]
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(sample))
    longer = msgspec.msgpack.encode([*fields, "new"])
    for inbox in inboxes_of(sample):
        assert plain(MessageDecoder[Any](INBOXES[inbox]).decode(longer)) == plain(sample)


DECODERS = [MessageDecoder[Any](union) for union in [*INBOXES.values(), m.Envelope, m.Launch]]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_only_decode_errors(data):
    for decoder in DECODERS:
        try:
            decoder.decode(data)
        except msgspec.DecodeError:
            continue


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 10_000),
    tail=st.sampled_from([b"", b"\x91" * 3000, b"\xa1\xff"]),
)
def test_damaged_messages_raise_only_decode_errors(name, edits, cut, tail):
    data = bytearray(msgspec.msgpack.encode(SAMPLES[name]))
    for index, value in edits:
        data[index % len(data)] = value
    spoilt = bytes(data[: cut % (len(data) + 1)]) + tail
    for decoder in DECODERS:
        for candidate in (bytes(data), spoilt):
            try:
                decoder.decode(candidate)
            except msgspec.DecodeError:
                continue
