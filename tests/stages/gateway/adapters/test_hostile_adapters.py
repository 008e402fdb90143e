"""Paths that clients name for adapters: no file blocks or kills the gateway, and errors tell nothing of other files."""

import errno
import json
import os
import struct
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.config.settings import LoraSettings
from pipeline.lora.convert import convert
from pipeline.runtime import messages as m
from pipeline.runtime.files import regular_files
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.gateway.admin import adapters
from tests.lora.random_adapters import write_adapter
from tests.rig import PATIENCE_S
from tests.stages.gateway.adapters.test_adapters import load
from tests.stages.gateway.gate import Gate

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, lora=LoraSettings(runtime_loading=True)) as gate:
        yield gate


def adapter(tmp_path: Path, name: str = "peft") -> Path:
    return write_adapter(tmp_path / name, ModelConfig.load(tmp_path), rank=2)


def refused(gate: Gate, path: Path | str) -> str:
    response = load(gate, lora_name="x", lora_path=str(path)).result()
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "lora_path"), response.text
    return str(error["message"])


def works(gate: Gate, folder: Path) -> None:
    response = load(gate, lora_name="good", lora_path=str(folder))
    asked = gate.rig.receive("supervisor", m.SetAdapter)
    gate.rig.send(m.AdapterSet(asked.nonce), "supervisor.0")
    assert response.result().status_code == 200


def test_fifos_and_devices_block_nothing(gate: Gate, tmp_path: Path) -> None:
    good = adapter(tmp_path)
    os.mkfifo(fifo := tmp_path / "fifo.gguf")
    folders = []
    for name in (CONFIG, WEIGHTS):
        folders.append(folder := adapter(tmp_path, f"fifo in {name}"))
        (folder / name).unlink()
        os.mkfifo(folder / name)
    (link := adapter(tmp_path, "zero") / WEIGHTS).unlink()
    link.symlink_to("/dev/zero")
    for path in (fifo, *folders, link.parent) * 3:
        refused(gate, path)
    assert gate.client.get("/openapi.json").status_code == 200
    works(gate, good)


def test_errors_are_the_same_for_all_that_is_no_adapter(gate: Gate, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / CONFIG).write_text('{"secret": 1}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / CONFIG).write_bytes(b"\xff{")
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / CONFIG).write_bytes(b" " * (5 << 20))
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "file").write_text("hello")
    os.mkfifo(tmp_path / "fifo.gguf")
    names = ("none", "none/deeper", "empty", "other", "broken", "large", "file", "file/x", "none.gguf", "text.gguf")
    odd = ("model.gguf", "fifo.gguf", "nu\0l", "nu\0l.gguf", "a" * 300, "empty.gguf/../none.gguf")
    messages = {refused(gate, tmp_path / name) for name in (*names, *odd)}
    assert messages == {adapters.NO_ADAPTER}
    assert str(tmp_path) not in adapters.NO_ADAPTER


def test_a_valid_config_tells_nothing_of_what_the_weights_lead_to(gate: Gate, tmp_path: Path) -> None:
    folder = adapter(tmp_path)
    (tmp_path / "a file").write_text("hello, hello, hello")
    (tmp_path / "large").write_bytes(b"\xff" * 40)
    (tmp_path / "text").write_bytes(b"\x05" + b"\0" * 7 + b"hello")
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(LoraSettings().max_adapter_bytes + 1)
    names = ("none", "a file/below", "a file", "large", "text", "fifo", "sparse", ".", "loop")
    (tmp_path / "loop").symlink_to("loop")
    messages = set()
    for target in (*(tmp_path / name for name in names), Path("/dev/zero"), Path("/dev/null")):
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to(target)
        messages.add(refused(gate, folder))
    assert messages == {adapters.NO_ADAPTER}


def test_what_is_an_adapter_gets_an_error_that_helps(gate: Gate, tmp_path: Path) -> None:
    folder = adapter(tmp_path)
    (folder / CONFIG).write_text('{"peft_type": "LORA", "r": "8"}')
    assert "$.r" in refused(gate, folder)


def test_only_allowed_folders(tmp_path: Path) -> None:
    inside, outside = tmp_path / "allowed", tmp_path / "allowed too"
    inside.mkdir()
    outside.mkdir()
    lora = LoraSettings(runtime_loading=True, allowed_folders=[str(inside), str(tmp_path / "none")])
    with Gate(tmp_path, lora=lora) as gate:
        good, other = (write_adapter(each / "peft", ModelConfig.load(tmp_path), rank=2) for each in (inside, outside))
        (inside / "link").symlink_to(other)
        (outside / "link").symlink_to(good)
        mixed = write_adapter(inside / "mixed", ModelConfig.load(tmp_path), rank=2)
        (mixed / WEIGHTS).unlink()
        (mixed / WEIGHTS).symlink_to(other / WEIGHTS)
        for path in (other, inside / ".." / "allowed too" / "peft", inside / "link", outside / "none", mixed):
            assert refused(gate, path) == adapters.NO_ADAPTER
        assert "No such file" in refused(gate, inside / "none"), "in an allowed folder, the error helps"
        works(gate, outside / "link")
        works(gate, good)


def test_a_link_that_changes_after_the_check_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (inside := tmp_path / "allowed").mkdir()
    (tmp_path / "outside").mkdir()
    lora = LoraSettings(runtime_loading=True, allowed_folders=[str(inside)])
    with Gate(tmp_path, lora=lora) as gate:
        model = ModelConfig.load(tmp_path)
        other = write_adapter(tmp_path / "outside" / "peft", model, rank=2)
        for swapped in (CONFIG, WEIGHTS, ""):
            good = write_adapter(inside / f"peft {swapped}", model, rank=2)

            def swapping(source: Path, *rest: Any, good: Path = good, swapped: str = swapped) -> str:
                good.rename(f"{good} before") if not swapped else (good / swapped).unlink()
                (good / swapped).symlink_to(other / swapped)
                return convert(source, *rest)

            monkeypatch.setattr(adapters, "convert", swapping)
            assert refused(gate, good) == adapters.NO_ADAPTER
        (inside / "x.gguf").write_bytes(b"")
        (tmp_path / "outside" / "x.gguf").write_bytes(b"GGUF")
        other = tmp_path / "outside"
        monkeypatch.setattr(
            adapters, "convert", lambda source, *rest: swapping(source, *rest, good=inside, swapped="x.gguf")
        )
        assert refused(gate, inside / "x.gguf") == adapters.NO_ADAPTER


def test_a_full_disk_is_no_fault_of_the_adapter(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    good = adapter(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.lora.convert.write_each", full)
        response = load(gate, lora_name="x", lora_path=str(good)).result()
    error = response.json()["error"]
    assert response.status_code == 500
    assert error["message"] == "the adapter could not be written into the server's cache: No space left on device"
    works(gate, good)


LARGE_BYTES = 1 << 30


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read of a large file has returned: not of the model's config."""
    counts: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Any, position: int) -> int:
        num = preadv(fd, buffers, position)
        if os.fstat(fd).st_size >= LARGE_BYTES:
            counts.append(num)
        return num

    monkeypatch.setattr(os, "preadv", counting)
    return counts


def test_of_a_large_file_that_is_no_adapter_only_the_first_bytes_are_read(
    gate: Gate, tmp_path: Path, num_read: list[int]
) -> None:
    """So neither the time nor the memory of a load tells that a file is there, or how large it is."""
    model = gguf_keys({"general.type": "model"})
    for first, most in ((b"text", 4), (b"GGUF" + b"\0" * 100, 5 << 20), (model, 5 << 20)):
        with (tmp_path / "large.gguf").open("wb") as file:
            file.write(first)
            file.truncate(LARGE_BYTES)
        num_read.clear()
        assert refused(gate, tmp_path / "large.gguf") == adapters.NO_ADAPTER
        assert sum(num_read) <= most


def test_tensors_are_read_only_from_a_file_with_their_size(gate: Gate, tmp_path: Path, num_read: list[int]) -> None:
    folder = adapter(tmp_path)
    size = (folder / WEIGHTS).stat().st_size
    os.truncate(folder / WEIGHTS, 1 << 30)
    assert f"has {1 << 30} bytes, and the header describes {size}" in refused(gate, folder)
    assert sum(num_read) < size + (64 << 10)
    os.truncate(folder / WEIGHTS, size - 1)
    assert f"has {size - 1} bytes, and" in refused(gate, folder)
    keys = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "llama"}
    name = b"blk.0.attn_v.weight.lora_a"
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, 1 << 12, 1 << 17, 0, 0)
    with (tmp_path / "large.gguf").open("wb") as file:
        file.write(gguf_keys(keys, num_tensors=1) + tensor)
        file.truncate(LARGE_BYTES)
    num_read.clear()
    assert "bytes of tensor 'blk.0.attn_v.weight.lora_a' are not in the file" in refused(gate, tmp_path / "large.gguf")
    assert sum(num_read) <= 5 << 20


F32 = 0


def gguf_of(path: Path, tensors: list[tuple[str, int, int, int]], num_bytes: int) -> Path:
    """A sparse file with tensors of float32: name, rows, columns and offset."""
    keys = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "llama"}
    infos = [
        struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IQQIQ", 2, columns, rows, F32, offset)
        for name, rows, columns, offset in tensors
    ]
    path.write_bytes(gguf_keys(keys, len(tensors)) + b"".join(infos))
    os.truncate(path, num_bytes)
    return path


@pytest.mark.parametrize("fault", ["shape", "rank", "shared bytes", "gap", "no lora_b", "rows of no projection"])
def test_of_a_refused_adapter_only_the_header_is_read(
    gate: Gate, tmp_path: Path, num_read: list[int], fault: str
) -> None:
    """Its matrices would take many times the bytes of the file, which may be sparse."""
    model, many, module = ModelConfig.load(tmp_path), 1 << 20, "blk.0.attn_q"
    queries, inputs = model.num_heads * model.head_dim, model.hidden_size
    a, b = (1, many * 32, 0), (many, 32, many * 128)
    match fault:
        case "rank":
            a, b = (many, inputs, 0), (queries, many, many * inputs * 4)
        case "shared bytes":
            a, b = (1, many * 32, 0), (many, 32, 0)
        case "gap":
            a, b = (32, inputs, 0), (queries, 32, many * 128)
        case "rows of no projection":
            module = "blk.0.attn_qkv"
            a, b = (32, inputs, 0), (many, 32, inputs * 128)
    tensors = [(f"{module}.weight.lora_{part}", *span) for part, span in (("a", a), ("b", b))]
    path = gguf_of(tmp_path / "x.gguf", tensors[: 1 if fault == "no lora_b" else 2], 1 << 30)
    num_read.clear()
    message = refused(gate, path)
    assert message != adapters.NO_ADAPTER and "x.gguf: " in message
    assert sum(num_read) <= 5 << 20


@pytest.mark.parametrize("fault", ["shape", "rank", "shared bytes", "gap", "module"])
def test_of_refused_weights_only_the_header_is_read(
    gate: Gate, tmp_path: Path, num_read: list[int], fault: str
) -> None:
    folder, model, many = adapter(tmp_path), ModelConfig.load(tmp_path), 1 << 22
    queries, inputs = model.num_heads * model.head_dim, model.hidden_size
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {"lora_A": [2, many], "lora_B": [many, 2]}
    match fault:
        case "rank":
            shapes = {"lora_A": [many, inputs], "lora_B": [queries, many]}
        case "gap":
            shapes = {"lora_A": [2, inputs], "lora_B": [queries, 2]}
        case "module":
            module = "base_model.model.lm_head"
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, size = 0 if fault == "shared bytes" else end, 2 * shape[0] * shape[1]
        end = begin + size
        header[f"{module}.{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        end += many if fault == "gap" else 0
    end -= many if fault == "gap" else 0
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(folder / WEIGHTS, 8 + len(text) + end)
    num_read.clear()
    message = refused(gate, folder)
    assert message != adapters.NO_ADAPTER and WEIGHTS in message
    assert sum(num_read) <= 64 << 10


def gguf_keys(keys: dict[str, str], num_tensors: int = 0) -> bytes:
    """The begin of a GGUF file with texts."""
    texts = [
        struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IQ", 8, len(value)) + value.encode()
        for key, value in keys.items()
    ]
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(keys)) + b"".join(texts)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter(tmp_path)
    preadv = os.preadv

    def truncating(fd: int, buffers: Any, position: int) -> int:
        if position:  # the length of the header has been read
            os.truncate(folder / WEIGHTS, 512)
        return preadv(fd, buffers, position)

    monkeypatch.setattr(os, "preadv", truncating)
    monkeypatch.setattr(regular_files, "PART_BYTES", 4096)
    message = refused(gate, folder)
    assert "not in the file" in message or "incomplete" in message
    assert gate.client.get("/version").status_code == 200


def test_large_files_are_refused(tmp_path: Path) -> None:
    with Gate(tmp_path, lora=LoraSettings(runtime_loading=True, max_adapter_bytes=1000)) as gate:
        assert refused(gate, adapter(tmp_path)) == adapters.NO_ADAPTER, "the size of a file is no client's business"


def test_reads_that_hang_stop_neither_other_work_nor_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a network share that has died."""
    monkeypatch.setattr(adapters, "MAX_PENDING", 1)
    with Gate(tmp_path, lora=LoraSettings(runtime_loading=True)) as gate:
        monkeypatch.setattr(adapters, "convert", lambda *_: time.sleep(3600))
        loads = [gate.do(gate.client.post, "/v1/load_lora_adapter", json=body(i)) for i in range(4)]
        done, hung = wait(loads, PATIENCE_S, FIRST_COMPLETED)  # two have threads, and one waits
        (refused_one,) = done
        assert refused_one.result().json()["error"]["code"] == "overloaded"
        assert gate.client.get("/openapi.json").status_code == 200
        assert gate.client.get("/version").status_code == 200
        assert len(hung) == 3 and not any(one.done() for one in hung)
        gate.rig.send(m.Stop())
        for one in hung:
            with pytest.raises(httpx.RemoteProtocolError):
                one.result(PATIENCE_S)


def test_a_load_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "LOAD_TIMEOUT_S", 0.05)
    with Gate(tmp_path, lora=LoraSettings(runtime_loading=True)) as gate:
        monkeypatch.setattr(adapters, "convert", lambda *_: time.sleep(3600))
        response = gate.client.post("/v1/load_lora_adapter", json=body(0))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "stage_unresponsive")


def body(number: int) -> dict[str, str]:
    return {"lora_name": f"x{number}", "lora_path": f"/adapters/{number}"}
