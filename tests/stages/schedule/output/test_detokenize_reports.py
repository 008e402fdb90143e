"""When detokenize is woken for sequences that begin."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Raw

from pipeline.runtime import messages as m
from pipeline.stages.schedule.output.detokenize_reports import DetokenizeReports

OPEN = m.Open(1, 2, 1, 0, 0, b"", Raw(b"\x90"))
REJECT = m.Reject(3, 1, 0, m.Failure(400, "no"))


@pytest.mark.parametrize(
    ("is_encoder", "openings", "wakes"),
    [(True, [OPEN, OPEN], False), (True, [OPEN, REJECT], True), (False, [OPEN], True)],
)
def test_openings_of_texts_wait_for_their_output(is_encoder: bool, openings: list[Any], wakes: bool) -> None:
    """An encoder's texts have it after one step."""
    sent: list[tuple[list[Any], bool]] = []

    def send_all(messages: Sequence[Any], *, wakes: bool) -> bool:
        sent.append((list(messages), wakes))
        return True

    scheduler: Any = SimpleNamespace(
        config=SimpleNamespace(is_encoder=is_encoder),
        replica_of=lambda opening: 0,
        output_buffer=SimpleNamespace(pending=lambda replica, now_s: None),
    )
    stage: Any = SimpleNamespace(
        outboxes={"detokenize.0": SimpleNamespace(send_all=send_all)},
        replay_context=SimpleNamespace(monotonic=lambda: 0.0),
    )
    reports = DetokenizeReports(stage, scheduler)
    for opening in openings:
        reports.add(opening)
    assert reports.send() and reports.send()
    assert sent == [(openings, wakes)]
