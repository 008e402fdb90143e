"""tools/fuzzing/fuzz_images.py: a bounded slice of it, and that it finds planted faults."""

from pathlib import Path

import pytest

from pipeline.media.jobs import Decoded
from tests.slices import part_of
from tests.tools.fuzzing.slice import expect_no_failures
from tools.fuzzing import fuzz_images

CASES = part_of(2000, 150)


def test_mutated_images_give_pixels_or_an_error_of_ours(tmp_path: Path) -> None:
    expect_no_failures("fuzz_images", CASES, tmp_path / "failures")


def test_a_case_depends_only_on_its_seed() -> None:
    originals = list(fuzz_images.images())
    assert fuzz_images.case(5, 1, originals) == fuzz_images.case(5, 1, originals)
    assert fuzz_images.case(5, 1, originals)[0] != fuzz_images.case(5, 2, originals)[0]


def test_the_unmodified_images_are_accepted() -> None:
    config = fuzz_images.CONFIGS[0]
    for data in fuzz_images.images():
        result, words = fuzz_images.run_case(data, config, 256, 30.0)
        assert result == "accepted", words


def test_a_crash_and_a_loop_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> Decoded:
        raise RuntimeError

    def loop(*_: object) -> Decoded:
        while True:
            pass

    config = fuzz_images.CONFIGS[0]
    for work, timeout_s, words in ((crash, 30.0, "ended with code 1"), (loop, 0.2, "not finished within 0.2 s")):
        monkeypatch.setattr(fuzz_images, "decoded", work)
        assert fuzz_images.run_case(b"x", config, 256, timeout_s) == ("failed", words)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Decoded(0, "can't be decoded"), "can't be decoded"),
        (Decoded(0, "<PIL.Image at 0x7f>"), "not for clients"),
        (Decoded(0, "a\nb"), "not for clients"),
        (Decoded(0, shape=(1, 3, 2, 2), text="<image>", run_lengths=(4,)), "in 13 bytes"),
        (Decoded(0, shape=(1, 3, 1, 1), text="<image><image>", run_lengths=(4,)), "in 13 bytes"),
    ],
)
def test_wrong_answers_are_found(answer: Decoded, why: str) -> None:
    assert why in fuzz_images.wrong(answer, 13, fuzz_images.CONFIGS[0])


def test_runs_that_do_not_fit_the_text_are_found() -> None:
    answer = Decoded(0, shape=(1, 3, 2, 2), text="<image><image>", run_lengths=(4,))
    assert fuzz_images.wrong(answer, 12, fuzz_images.CONFIGS[0]).startswith("runs of (4,) rows")
