"""A replay of ingest sends the same prompts and results of its grammar checker."""

import contextlib
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from pipeline.cli.replay.replaying import replay
from pipeline.config.settings import IngestSettings, Settings
from pipeline.errors import UserError
from pipeline.replay import format as f
from pipeline.runtime import messages as m
from pipeline.shm.arrays import ShmRef
from tests.rig import Rig
from tests.stages.execute.grammar_masks.test_masks import ENDLESS
from tests.stages.ingest import models as tiny
from tests.stages.replays import entries, replays_alike


def test_a_replay_of_ingest_sends_the_same_prompts_with_any_thread_times(tmp_path: Path, smollm2_dir: Path) -> None:
    recording = tmp_path / "ingest.rec"
    sets = Settings(ingest=IngestSettings(arena_bytes=65536))
    with Rig("ingest", sets, model_dir=smollm2_dir, record=recording) as rig:
        rig.start(tiny.facts(max_model_len=100_000, vocab_size=49152))
        long = "a story of the sea. " * 3000
        for i in range(3):
            rig.send(tiny.submit(tiny.chat("hi"), request_id=10 + i), "gateway.0")
            rig.send(tiny.submit(long + str(i), request_id=20 + i), "gateway.0")
        rig.send(m.Abort(22, 1), "gateway.0")
        rig.send(tiny.submit("", request_id=30), "gateway.0")
        ended: set[int] = set()
        while len(ended) < 7:
            message = rig.receive("gateway")
            ended.add(message.request_id)
            if isinstance(message, m.Accepted) and isinstance(message.prompt_ids, ShmRef):
                slab = message.prompt_ids
                for reader in ("gateway.0", "schedule.0"):
                    rig.send(m.Release([slab.offset], [slab.generation], reader), reader)
        rig.load()
    assert any(isinstance(one, f.ObservedEvent) and one.name == "encoded" for one in entries(recording))
    comparison = replays_alike("ingest", recording)
    assert set(comparison.sent) == {"gateway.0", "schedule.0"}


def kill_busy_checker(killed: set[int]) -> int:
    """Kill the process that checks grammars when it works, if it is none of those. Returns its pid."""
    end_s = time.monotonic() + 10
    while True:
        assert time.monotonic() < end_s, "nothing is checked"
        for one in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                if one.pid not in killed and "grammars" in one.cmdline()[0] and one.children():
                    one.kill()
                    return one.pid
        time.sleep(0.002)


def test_a_replay_of_ingest_repeats_the_recorded_results_of_its_grammar_checker(tmp_path: Path) -> None:
    """The recorded checker was killed during its work, which is a 503; the replay's checker returns a 400."""
    recording = tmp_path / "grammars.rec"
    with Rig("ingest", Settings(), model_dir=tiny.folder(tmp_path), record=recording) as rig:
        rig.start(tiny.facts())
        good = tiny.submit("hi", request_id=1, grammar=m.Grammar("regex", "a+"))
        rig.send(good, "gateway.0")
        rig.receive("gateway", m.Accepted)
        hostile = tiny.submit("hi", request_id=2, grammar=m.Grammar("grammar", ENDLESS))
        rig.send(hostile, "gateway.0")
        killed: set[int] = set()
        for _ in range(2):  # a check whose checker was killed is tried once more
            killed.add(kill_busy_checker(killed))
        assert rig.receive("gateway", m.Rejected).failure.status == 503
        rig.load()
    comparison = replays_alike("ingest", recording)
    assert set(comparison.sent) == {"gateway.0", "schedule.0"}


def test_a_replay_needs_no_folder_of_sampling_parameters(tmp_path: Path) -> None:
    recording, parameters = tmp_path / "ingest.rec", tmp_path / "parameters" / "generation_config.json"
    parameters.parent.mkdir()
    parameters.write_text('{"max_new_tokens": 7, "suppress_tokens": [5], "begin_suppress_tokens": [6]}')
    sets = Settings(generation_config=str(parameters.parent))
    with Rig("ingest", sets, model_dir=tiny.folder(tmp_path), record=recording) as rig:
        rig.start(tiny.facts())
        rig.send(tiny.submit("hi"), "gateway.0")
        options = msgspec.msgpack.decode(rig.receive("schedule", m.Admit).options, type=m.GenerationOptions)
        assert options.max_tokens == 7 and options.bad_words_ids == [[5], [m.BEGIN, 6]]
        rig.load()
    parameters.unlink()
    assert set(replays_alike("ingest", recording).sent) == {"gateway.0", "schedule.0"}

    old = tmp_path / "old.rec"  # of a version that did not record the parameters
    with f.RecordingReader(recording) as reader:
        header = msgspec.structs.replace(reader.header, generation=None)
        old.write_bytes(f.MAGIC + b"".join(map(f.frame, [header, *reader])))
    with pytest.raises(UserError, match="recorded server's setting generation_config") as error:
        replay("ingest", old, tmp_path / "out", paced=False, inline=True)
    assert str(parameters) in str(error.value)
