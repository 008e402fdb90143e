"""`pipeline check-model --fidelity --kl-base FILE` writes log probabilities as llama-perplexity does."""

import struct
from pathlib import Path

import numpy as np
import pytest

from pipeline.__main__ import main
from pipeline.cli.check.chunks import CHUNK_SIZE, COUNTED
from pipeline.cli.check.kl_base import DEPTH, LEVELS, KlBaseFile, record_of
from pipeline.errors import UserError


def log_softmax(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.float64)
    return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


def read_record(record: bytes, size: int) -> np.ndarray:
    """The log probabilities of a record, as llama-perplexity reads them."""
    scale, least = struct.unpack("<ff", record[:8])
    codes = np.frombuffer(record[8:], "<u2")
    assert len(codes) == 2 * ((size + 1) // 2)
    return scale * codes[:size].astype(np.float64) + least


@pytest.mark.parametrize("size", [50, 51])
def test_a_record_has_the_log_probabilities_of_likely_tokens(size: int) -> None:
    row = np.random.default_rng(0).normal(0, 6, size).astype(np.float32)
    expected, found = log_softmax(row), read_record(record_of(row), size)
    near = expected > expected.max() - DEPTH
    assert 0 < near.sum() < size, "some are left out"
    np.testing.assert_allclose(found[near], expected[near], atol=DEPTH / LEVELS)
    np.testing.assert_allclose(found[~near], expected.max() - DEPTH, atol=1e-4)
    assert found.argmax() == expected.argmax()


def test_equal_logits_have_equal_probabilities() -> None:
    np.testing.assert_allclose(read_record(record_of(np.full(8, 3.0, np.float32)), 8), -np.log(8), atol=1e-6)


def test_the_file_begins_with_the_ids(tmp_path: Path) -> None:
    chunks = [list(range(CHUNK_SIZE)), list(range(5, CHUNK_SIZE + 5))]
    logits = np.random.default_rng(1).normal(0, 3, (2, len(COUNTED), 7)).astype(np.float32)
    with KlBaseFile(str(tmp_path / "base")) as file:
        for part in logits:
            file.add(chunks, part)
    data = (tmp_path / "base").read_bytes()
    assert data[:8] == b"_logits_" and struct.unpack("<iii", data[8:20]) == (CHUNK_SIZE, 7, 2)
    assert np.frombuffer(data[20:], "<i4", 2 * CHUNK_SIZE).reshape(2, -1).tolist() == chunks
    records = data[20 + 8 * CHUNK_SIZE :]
    assert len(records) == 2 * len(COUNTED) * (8 + 2 * 8)
    last = read_record(records[-24:], 7)
    np.testing.assert_allclose(last, log_softmax(logits[1, -1]), atol=DEPTH / LEVELS)


def test_a_failed_measurement_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "base"
    with pytest.raises(UserError, match="broken"), KlBaseFile(str(path)) as file:
        file.add([[1] * CHUNK_SIZE], np.zeros((1, 4), np.float32))
        raise UserError("broken")
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--kl-base \S+/no/base: cannot be written: No such file"):
        KlBaseFile(str(tmp_path / "no" / "base"))


def test_the_option_needs_fidelity(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model", "/no/such/folder", "--kl-base", "base"]) == 2
    assert "--kl-base: only --fidelity has this file; add --fidelity" in capsys.readouterr().err
