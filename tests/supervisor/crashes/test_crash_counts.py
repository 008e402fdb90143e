"""Which requests fail for the crashes of a stage, and who learns of the others that may be the reason."""

from collections.abc import Iterator

import pytest

from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.runtime import messages as m
from pipeline.runtime.process import black_box
from pipeline.runtime.process.black_box import MAX_SUSPECTS
from pipeline.supervisor.crashes.crash_counts import MAX_CRASHES, CrashCounts
from pipeline.supervisor.shared.resources import SharedResources

POISON, OTHER = 2**64 - 1, 5


@pytest.fixture
def resources() -> Iterator[SharedResources]:
    resources = SharedResources(Settings(execute=ExecuteSettings(tensor_parallel=2)), [], [], None)
    try:
        resources.create_arenas()
        resources.create_rings()
        yield resources
    finally:
        resources.close()


@pytest.mark.parametrize("stage", ["ingest", "schedule", "execute", "detokenize"])
@pytest.mark.parametrize("num_beside_others", range(MAX_CRASHES + 2))
def test_a_request_fails_at_its_third_crash_or_the_first_alone_behind_it(stage: str, num_beside_others: int) -> None:
    counts = CrashCounts()
    for _ in range(num_beside_others):
        assert counts.crashed(stage, [POISON, OTHER]) is None, "any of them may be the reason"
    num = num_beside_others
    failing = None
    while failing is None:
        failing = counts.crashed(stage, [POISON])
        num += 1
    assert num == max(MAX_CRASHES, num_beside_others + 1)
    assert failing == m.FailRequests({POISON: f"{stage} died {num} times while it worked on this request"})


def test_crashes_of_one_stage_do_not_count_for_another() -> None:
    counts = CrashCounts()
    stages = ("ingest", "schedule", "execute", "detokenize")
    for _ in range(MAX_CRASHES - 1):
        assert [counts.crashed(stage, [POISON]) for stage in stages] == [None] * 4
    assert counts.crashed("schedule", []) is None
    assert counts.crashed("schedule", [OTHER]) is None


def test_new_ids_clear_a_request_of_crashes_of_schedule_and_execute() -> None:
    """Detokenize may not have seen them, and ingest had no part in them."""
    counts = CrashCounts()
    for _ in range(MAX_CRASHES - 1):
        for stage in ("ingest", "schedule", "execute", "detokenize"):
            assert counts.crashed(stage, [POISON]) is None
    counts.cleared([POISON, OTHER])
    assert counts.of("schedule") == {}
    assert counts.crashed("schedule", [POISON]) is counts.crashed("execute", [POISON]) is None
    assert counts.crashed("ingest", [POISON]) and counts.crashed("detokenize", [POISON])


def test_schedule_learns_of_its_own_crashes_and_the_executor_s_and_ingest_of_its_own(
    resources: SharedResources,
) -> None:
    """In its launch, and of the executor's also while it runs."""
    counts = resources.crash_counts
    counts.crashed("schedule", [POISON, OTHER])
    for _ in range(2):
        counts.crashed("execute", [OTHER, 6])
    counts.crashed("ingest", [7])
    counts.crashed("detokenize", [8])
    expected = {"schedule": {POISON: 1, OTHER: 2, 6: 2}, "ingest": {7: 1}, "execute": {}, "detokenize": {}}
    for stage, known in expected.items():
        assert resources.launch(stage, "", []).crash_counts == known
    for name, receiver, known in (
        ("execute.0", "schedule.0", expected["schedule"]),
        ("ingest.0", "schedule.0", {}),
        ("schedule.0", "gateway.0", {}),
    ):
        found = resources.restart_of(name, receiver, 1)
        assert found is not None and found[0].crash_counts == known


def test_the_oldest_suspects_are_forgotten() -> None:
    counts = CrashCounts()
    for first in range(0, 10 * MAX_SUSPECTS, MAX_SUSPECTS):
        counts.crashed("schedule", range(first, first + MAX_SUSPECTS))
    assert len(counts.of("schedule")) == 2 * MAX_SUSPECTS and 10 * MAX_SUSPECTS - 1 in counts.of("schedule")


def test_the_suspects_are_named_by_threads_or_listed_by_schedule(resources: SharedResources) -> None:
    """Schedule's list is of what the executor, or a rank of it, had in work too."""
    memories = {}
    for name in ("ingest.0", "schedule.0", "execute.0", "execute.1", "detokenize.0"):
        resources.launch(name.partition(".")[0], "", [], int(name[-1]))
        box = resources.black_boxes.get(name, resources.incarnations[name])
        assert box is not None
        memories[name] = black_box.attach(box)

    def suspects(name: str) -> list[int]:
        return sorted(resources.black_boxes.suspects(name, resources.incarnations))

    black_box.SuspectList(memories["schedule.0"]).replace([5, 7])
    for name, expected in (("ingest.0", []), ("schedule.0", [5, 7]), ("execute.0", [5, 7]), ("execute.1", [5, 7])):
        assert suspects(name) == expected
    for name in ("ingest.0", "detokenize.0", "schedule.0"):
        black_box.Breadcrumb(memories[name]).at(9, 1)
        assert suspects(name) == [9]
    black_box.Breadcrumb(memories["ingest.0"], 1).at(10, 1)
    assert suspects("ingest.0") == [9, 10], "not only the one that was begun last"
    resources.renew("schedule.0")
    assert suspects("execute.0") == [], "the new scheduler has planned nothing yet"
