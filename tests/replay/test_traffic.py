"""Traces of traffic: the file, and what schedule notes."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.__main__ import main
from pipeline.cli.replay.traffic_command import TraceFile, write_trace
from pipeline.errors import UserError
from pipeline.replay.traffic import ReplicaProfile, TrafficRecord, line_of, read_profile, read_trace

GOOD = {"timestamp": 5, "input_length": 1200, "output_length": 7, "hash_ids": [1, 2, 3]}


def test_a_public_trace_is_read_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | {"timestamp": 2, "unknown": 1}) + "\n")
    records = read_trace(path)
    assert [one.timestamp for one in records] == [2, 5]
    assert records[0].block_size == 512 and records[0].hash_ids == [1, 2, 3]
    assert len(read_trace(path, limit=1)) == 1


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    records = [
        TrafficRecord(0.5, 100, 20, [2**53 - 1], 64, [4], [20, 7], -3, 9),
        TrafficRecord(7.25, 1, 0, block_size=64),
    ]
    write_trace(tmp_path / "t.jsonl", records)
    assert read_trace(tmp_path / "t.jsonl") == records


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_length": "3"}, "input_length: expected `int`, got `str`"),
        ({"input_length": 0}, "input_length: expected `int` >= 1"),
        ({"output_length": None}, "output_length: expected `int`, got `null`"),
        ({"timestamp": -1}, "timestamp: expected `float` >= 0.0"),
        ({"hash_ids": [1, "a"]}, "hash_ids[1]: expected `int`, got `str`"),
        ({"hash_ids": [1, 2, 3, 4]}, "hash_ids: has 4 numbers, but 1200 tokens have 3 blocks of 512"),
        ({"block_size": 256, "hash_ids": []}, "block_size: it is 256, but 512 in line 1"),
        ({"output_lengths": [3, 4]}, "output_length: needs the largest of output_lengths, 4"),
        ({"output_hash_ids": [4, 5]}, "output_hash_ids: has 2 numbers, more than the output has blocks of 512"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(UserError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}:2: {words}")


@pytest.mark.parametrize("text", ["", "\n", "x\n", "[1]\n", '{"timestamp": 1}\n', "\xff"])
def test_what_is_no_trace_has_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"t\.jsonl:"):
        read_trace(path)
    with pytest.raises(UserError, match="can't be read"):
        read_trace(tmp_path)


def test_a_profile_names_its_wrong_field(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"kv_tokens": 0}')
    with pytest.raises(UserError, match=r"r\.json: kv_tokens: expected `int` >= 1"):
        read_profile(path)
    path.write_text('{"kv_token": 1}')
    with pytest.raises(UserError, match="kv_token: there is no such field"):
        read_profile(path)
    path.write_text('{"base_s": 0, "row_s": 0}')
    with pytest.raises(UserError, match="token_s, and base_s or row_s, need more than 0"):
        read_profile(path)
    path.write_text("{}")
    assert read_profile(path) == ReplicaProfile()


def test_a_line_has_only_known_fields_of_numbers() -> None:
    line = json.loads(line_of(TrafficRecord(1.0, 2, 3, [4], 64, [5], [3], 1, 6)))
    assert all(isinstance(value, int | float | list) for value in line.values())
    assert np.all([isinstance(each, int) for value in line.values() if isinstance(value, list) for each in value])


def test_a_growing_trace_is_valid_at_any_time_and_sorted_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    file = TraceFile(path, 10_000)
    file.add([TrafficRecord(7.0, 1, 1), TrafficRecord(3.0, 1, 1)])
    assert [json.loads(line)["timestamp"] for line in path.read_text().splitlines()] == [7.0, 3.0]
    file.add([TrafficRecord(5.0, 1, 1)])
    file.close()
    assert [json.loads(line)["timestamp"] for line in path.read_text().splitlines()] == [3.0, 5.0, 7.0]
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_stops_at_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    file = TraceFile(path, 4096)
    file.add([TrafficRecord(float(number), 100, 1) for number in range(1000)])
    file.close()
    assert file.is_full and path.stat().st_size == file.num_bytes <= 4096
    assert len(read_trace(path)) == file.num_requests > 10


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["schedule", "--block-tokens", "64"], "are for `pipeline record traffic`"),
        (["traffic", "--no-sent"], "traffic has no messages"),
        (["traffic", "--replica", "/nowhere/r.json"], "--replica /nowhere/r.json: can't be written"),
        (["traffic", "--block-tokens", "40"], "needs a multiple of 16"),
        (["traffic", "--pid", "1"], "error"),
    ],
)
def test_wrong_options_have_clear_errors(
    tmp_path: Path, words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["record", *words, "--out", str(tmp_path / "t.jsonl")])
    except SystemExit as usage:
        code = usage.code
    assert code in (1, 2)
    assert error in capsys.readouterr().err
