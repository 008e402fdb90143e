"""The request whose output ends detokenize's process is named in the black box."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime.process import black_box
from pipeline.stages.detokenize.output_sequence import OutputSequence
from pipeline.supervisor.crashes.black_boxes import BlackBoxes
from tests.rig import Rig
from tests.stages.detokenize.test_output_processor import opening
from tests.stages.detokenize.test_stage import FACTS, receive_until_closed, send, settled
from tests.stages.detokenize.vocabularies import byte_level, save

POISON, GOOD = 2, 1
"""Sequences. The request id of a sequence is made by `opening`."""


@pytest.fixture
def box() -> Iterator[m.BlackBox]:
    boxes = BlackBoxes(Settings())
    yield boxes.create("detokenize.0", 1)
    boxes.close()


@pytest.mark.parametrize("method", ["__init__", "settle"])
def test_the_request_that_ends_the_process_is_named(
    box: m.BlackBox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    save(byte_level(), tmp_path)
    poison = opening(POISON)
    really = getattr(OutputSequence, method)

    def fails(sequence: OutputSequence, *args: Any) -> Any:
        request_id = args[0].request_id if method == "__init__" else sequence.request_id
        if request_id == poison.request_id:
            raise MemoryError("fatal")
        return really(sequence, *args)

    monkeypatch.setattr(OutputSequence, method, fails)
    rig = Rig("detokenize", model_dir=tmp_path)
    rig.launch = msgspec.structs.replace(rig.launch, black_box=box)
    with pytest.raises(MemoryError, match="fatal"), rig:
        rig.start(FACTS)
        send(rig, opening(GOOD))
        send(rig, settled([(GOOD, 0, [5, 6], m.Finish.LENGTH)]))
        receive_until_closed(rig, GOOD)
        assert black_box.suspect_of(box) is None
        send(rig, opening(3))
        send(rig, poison)
        send(rig, settled([(3, 0, [5], m.Finish.NONE), (POISON, 0, [5], m.Finish.NONE)]))
        receive_until_closed(rig, POISON)
    assert black_box.suspect_of(box) == (poison.request_id, poison.attempt)


@pytest.mark.parametrize("incarnation", [1, 2])
def test_a_process_that_replaces_another_one_names_each_request_while_it_decodes(
    box: m.BlackBox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, incarnation: int
) -> None:
    """A signal leaves no time to name the request. What killed the first process comes again."""
    save(byte_level(), tmp_path)
    really, suspects = OutputSequence.settle, {}

    def settle(sequence: OutputSequence, *args: Any) -> None:
        suspects[sequence.request_id] = black_box.suspect_of(box)
        really(sequence, *args)

    monkeypatch.setattr(OutputSequence, "settle", settle)
    rig = Rig("detokenize", model_dir=tmp_path)
    rig.launch = msgspec.structs.replace(rig.launch, black_box=box, incarnation=incarnation)
    with rig:
        rig.start(FACTS)
        for seq in (GOOD, POISON):
            send(rig, opening(seq))
        send(rig, settled([(GOOD, 0, [5], m.Finish.LENGTH), (POISON, 0, [5], m.Finish.LENGTH)]))
        receive_until_closed(rig, GOOD)
        assert black_box.suspect_of(box) is None, "the work is done"
    ids = [opening(seq).request_id for seq in (GOOD, POISON)]
    named = {one: (one, opening(GOOD).attempt) for one in ids}
    assert suspects == (named if incarnation > 1 else dict.fromkeys(ids))
