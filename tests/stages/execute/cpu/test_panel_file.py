"""Packed weights are kept in a file, and later starts compute the same with it as without."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipeline.kernels.cpu import native
from pipeline.runtime.model.model_folder import PANELS
from pipeline.stages.execute.cpu.native import panel_file
from pipeline.stages.execute.cpu.native.panel_file import PanelLocation, PanelStore
from pipeline.stages.execute.ranks.context import RankContext
from pipeline.stages.execute.weights import TensorFile
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import row_add, settings
from tests.stages.execute.native_driver import Native, write

IDS = [7, 30, 211, 4, 9]
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 8, "head_dim": 32}
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def keeps_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_file, "MIN_BYTES", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with matrices of several formats, also in one product."""
    write(tmp_path, checkpoints.config_of(**SHAPE), ["q4_k", "bf16", "fp8", "q8_0"])
    return tmp_path


class Start:
    """One start of an executor: its logits, and whether it packed anything."""

    def __init__(self, folder: Path, **how: bool) -> None:
        driver = Native(folder, "auto", **how)
        try:
            store = driver.program._panels
            self.store: PanelStore | None = store
            self.packed = store is None or store._is_new
            self.was_mapped = store is not None and store._address != 0
            self.was_copied = store is not None and store._copy is not None
            driver.step([(0, 0, len(IDS), True)], adds=[row_add(0, IDS, [0])])
            self.logits = driver.logits().copy()
            assert store is None or store.wait(WAIT_S), "writing did not end"
        finally:
            driver.runner.close()


def test_the_second_start_maps_what_the_first_has_packed(folder: Path) -> None:
    first, second = Start(folder), Start(folder)
    assert first.packed and not first.was_mapped
    assert second.was_mapped and not second.packed
    np.testing.assert_array_equal(first.logits, second.logits)
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "model.safetensors", PANELS]


def test_each_matrix_begins_at_a_page_and_huge_pages_are_possible(folder: Path) -> None:
    Start(folder)
    driver = Native(folder, "auto")
    store = driver.program._panels
    assert store is not None and store._address % (2 * 1024**2) == 0
    assert all(address % panel_file.PAGE == 0 for _, address, _ in store._used)
    driver.runner.close()


def test_a_file_with_small_pages_is_copied_into_huge_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Start(folder)
    monkeypatch.setattr(native, "HUGE_PAGE", 1)
    monkeypatch.setattr(panel_file, "_can_be_huge", lambda: True)
    monkeypatch.setattr(panel_file, "_huge_bytes", lambda address: 0)
    copied = Start(folder)
    assert copied.was_copied and not copied.packed
    monkeypatch.setattr(panel_file, "_huge_bytes", lambda address: 1 << 40)
    mapped = Start(folder)
    assert not mapped.was_copied and not mapped.packed
    for start in (copied, mapped):
        np.testing.assert_array_equal(start.logits, first.logits)


@pytest.mark.parametrize("piece_bytes", [4096, 3 * 4096 + 100])
def test_pieces_of_any_size_make_the_same_file(folder: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Start(folder)
    whole = (folder / PANELS).read_bytes()
    (folder / PANELS).unlink()
    monkeypatch.setattr(panel_file, "PIECE_BYTES", piece_bytes)
    Start(folder)
    assert (folder / PANELS).read_bytes() == whole


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 3)


def of_another_kind(path: Path) -> None:
    path.write_bytes(b"something else, longer than a tail")


def length_beyond_the_file(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-16, os.SEEK_END)
        file.write((1 << 40).to_bytes(8, "little"))


@pytest.mark.parametrize("damage", [cut, cut_to_nothing, of_another_kind, length_beyond_the_file])
def test_a_damaged_file_is_written_again(folder: Path, damage: Callable[[Path], None]) -> None:
    first = Start(folder)
    damage(folder / PANELS)
    second, third = Start(folder), Start(folder)
    assert second.packed and not second.was_mapped
    assert third.was_mapped and not third.packed
    np.testing.assert_array_equal(first.logits, second.logits)
    np.testing.assert_array_equal(first.logits, third.logits)


def test_a_fifo_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / PANELS)
    assert not Start(folder).was_mapped and Start(folder).was_mapped


def test_a_file_that_is_cut_while_it_is_opened_is_written_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Start(folder)
    real = os.pread
    monkeypatch.setattr(
        os, "pread", lambda fd, size, at: real(fd, size, at)[: -1 if size == panel_file.TAIL.size else size]
    )
    assert Start(folder).packed


def test_other_weights_are_packed_again(folder: Path) -> None:
    first = Start(folder)
    write(folder, checkpoints.config_of(**SHAPE), ["q8_0"])
    second = Start(folder)
    assert second.packed and not second.was_mapped
    assert not np.array_equal(first.logits, second.logits)
    np.testing.assert_array_equal(Start(folder).logits, second.logits)


def replace_weights(folder: Path) -> None:
    """By another file with other bytes, of the same size and time."""
    path, successor = folder / "model.safetensors", folder / "successor"
    before = path.stat()
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({name: t.roll(1, 0) for name, t in load_file(path).items()}, successor, metadata)
    os.utime(successor, ns=(before.st_atime_ns, before.st_mtime_ns))
    successor.replace(path)
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_other_weights_of_the_same_size_and_time_are_packed_again(folder: Path) -> None:
    first = Start(folder)
    replace_weights(folder)
    second, third = Start(folder), Start(folder)
    assert second.packed and not second.was_mapped
    assert third.was_mapped and not third.packed
    expected = Start(folder, keep_packed_weights=False).logits
    assert not np.array_equal(first.logits, expected)
    for start in (second, third):
        np.testing.assert_array_equal(start.logits, expected)


def test_weights_that_are_replaced_during_a_start_are_packed_at_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = PanelLocation.of

    def replaced(folder: Path, files: Sequence[TensorFile], context: RankContext) -> PanelLocation | None:
        replace_weights(folder)
        return of(folder, files, context)

    with monkeypatch.context() as patch:
        patch.setattr(PanelLocation, "of", replaced)
        first = Start(folder)
    second = Start(folder)
    assert second.packed and not second.was_mapped
    assert not np.array_equal(first.logits, second.logits)
    np.testing.assert_array_equal(Start(folder, keep_packed_weights=False).logits, second.logits)


def test_another_layout_of_panels_is_packed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Start(folder)
    monkeypatch.setattr(native, "PANEL_LAYOUT", native.PANEL_LAYOUT + 1)
    assert Start(folder).packed
    assert not Start(folder).packed


def test_a_matrix_that_the_file_lacks_is_packed_and_added(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Start(folder)
    order = panel_file.key_of
    monkeypatch.setattr(
        panel_file, "key_of", lambda packed, names, rows: f"{order(packed, names, rows)} {'down' in names[0]}"
    )
    monkeypatch.setattr("pipeline.stages.execute.cpu.native.memory.key_of", panel_file.key_of)
    second, third = Start(folder), Start(folder)
    assert second.was_mapped and second.packed
    assert not third.packed
    np.testing.assert_array_equal(first.logits, third.logits)


def test_without_the_setting_no_file_is_written_or_read(folder: Path) -> None:
    first = Start(folder, keep_packed_weights=False)
    assert first.store is None and not (folder / PANELS).exists()
    Start(folder)
    again = Start(folder, keep_packed_weights=False)
    assert again.store is None
    np.testing.assert_array_equal(first.logits, again.logits)


def test_small_weights_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_file, "MIN_BYTES", 1 << 30)
    assert Start(folder).store is None
    assert not (folder / PANELS).exists()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.ECANCELED, errno.EIO])
def test_an_error_only_costs_the_file(folder: Path, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_file, "_write_file", lambda *_: error)
    assert Start(folder).packed
    assert [path.name for path in folder.iterdir() if path.name == PANELS] == []


def test_a_folder_that_cannot_be_written_only_costs_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECTORY)
    assert Start(folder).packed
    assert not (folder / PANELS).exists()


def test_closing_ends_the_writing(folder: Path) -> None:
    driver = Native(folder, "auto")
    store = driver.program._panels
    assert store is not None
    assert store.wait(WAIT_S)
    (folder / PANELS).unlink()
    store._stopped.value = 1
    store._write([])
    driver.runner.close()
    assert not (folder / PANELS).exists()


def test_another_server_may_be_faster(folder: Path) -> None:
    """Both write the same file; the one that ends last finds it there."""
    drivers = [Native(folder, "auto") for _ in range(2)]
    for driver in drivers:
        store = driver.program._panels
        assert store is not None and store.wait(WAIT_S)
    for driver in drivers:
        driver.runner.close()
    assert not Start(folder).packed


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_floats_are_rounded_once_and_kept_as_bfloat16(tmp_path: Path, dtype: str) -> None:
    """A checkpoint in another dtype computes as one that was rounded before."""
    write(tmp_path, checkpoints.config_of())
    path = tmp_path / "model.safetensors"
    given = load_file(path)
    wide = {name: t.to(getattr(torch, dtype)) + 1e-3 if t.dim() > 1 else t for name, t in given.items()}
    save_file({name: t.bfloat16() if t.dim() > 1 else t for name, t in wide.items()}, path)
    rounded = Start(tmp_path)
    save_file(wide, path)
    os.utime(path, ns=(1, 1))
    first, second = Start(tmp_path), Start(tmp_path)
    assert first.packed and second.was_mapped and not second.packed
    for start in (first, second):
        np.testing.assert_array_equal(start.logits, rounded.logits)


def test_files_differ_by_any_of_their_samples_and_their_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def fingerprint(index: int, value: float, name: str = "a") -> str:
        tensor = torch.zeros(1 << 18)
        tensor[index] = value
        save_file({name: tensor}, path)
        os.utime(path, ns=(1, 1))
        return TensorFile(path).fingerprint()

    assert fingerprint(0, 0.0) == fingerprint(0, 0.0)
    others = {fingerprint(0, 0.0), fingerprint(0, 1.0), fingerprint(-1, 1.0), fingerprint(0, 0.0, "b")}
    assert len(others) == 4
    assert settings().execute.keep_packed_weights
