"""Named API keys, and reading all keys again while the server runs."""

import hashlib
import os
import threading
from pathlib import Path

import msgspec
import pytest

from pipeline.config.load import ConfigError, load
from pipeline.config.settings import KeySettings
from pipeline.config.show import as_toml
from pipeline.runtime.security import key_book
from pipeline.runtime.security.api_keys import ApiKey, Keys
from pipeline.runtime.security.key_book import KeyBook, read

ALICE, BOB, PLAIN = "alice-0123456789abcdef", "bob-0123456789abcdef", "plain-0123456789abcdef"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def name_of(keys: Keys | None, key: str) -> str | None:
    assert keys is not None
    scope = keys.scope_of(key)
    found = None if scope is None else keys.of_scope(scope)
    return None if found is None else found.name


def write(path: Path, *keys: str) -> str:
    path.write_text("\n".join(keys))
    path.chmod(0o600)
    return str(path)


def test_a_key_is_given_by_its_digest_or_its_file(tmp_path: Path) -> None:
    tables = [
        KeySettings(name="alice", digest=f"sha256:{digest(ALICE).upper()}", rpm=5, tpm=9, models=("m",)),
        KeySettings(name="bob", file=write(tmp_path / "bob", BOB)),
    ]
    plain = write(tmp_path / "keys", PLAIN, BOB)
    keys, warnings = read(plain, {"PIPELINE_API_KEYS": "in-the-environment-0123"}, tables)
    assert warnings == [] and keys is not None
    assert [name_of(keys, key) for key in (ALICE, BOB, PLAIN, "in-the-environment-0123", "other")] == [
        *("alice", "bob", "key-1", "key-2", None)
    ]
    assert keys.of_scope(keys.scope_of(ALICE) or "") == ApiKey("alice", 0, 5, 9, ("m",))
    copy = Keys.unpacked(keys.packed())
    assert copy.all == keys.all and copy.scope_of(ALICE) == keys.scope_of(ALICE)
    for secret in (ALICE, BOB, PLAIN, digest(ALICE)):
        assert secret.encode() not in keys.packed() and bytes.fromhex(digest(ALICE)) not in keys.packed()


def test_keys_with_one_name_are_one_user(tmp_path: Path) -> None:
    """While a key is being replaced, the old one and the new one are valid."""
    tables = [KeySettings(name="alice", digest=digest(ALICE), file=write(tmp_path / "new", BOB))]
    keys, _ = read("", {}, tables)
    assert keys is not None and len(keys) == 2 and len(keys.all) == 1
    assert keys.scope_of(ALICE) == keys.scope_of(BOB) is not None


def test_a_reload_keeps_names_slots_and_scopes(tmp_path: Path) -> None:
    book, path = KeyBook(), tmp_path / "keys"
    book.take_environment({"PIPELINE_API_KEYS": "in-the-environment-0123"})
    before, _ = book.read(write(path, PLAIN, ALICE))
    after, _ = book.read(write(path, BOB, ALICE), [KeySettings(name="x", digest=digest("x" * 20))])
    assert before is not None and after is not None
    assert [name_of(after, key) for key in (PLAIN, ALICE, "in-the-environment-0123", BOB)] == [
        *(None, "key-2", "key-3", "key-4")
    ]
    assert before.scope_of(ALICE) == after.scope_of(ALICE)
    slots = {one.name: one.slot for one in (*before.all, *after.all)}
    assert sorted(slots.values()) == [0, 1, 2, 3, 4]
    again, _ = book.read(write(path, PLAIN))
    assert name_of(again, PLAIN) == "key-1"


def test_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    book, path = KeyBook(), tmp_path / "keys"
    book.read(write(path, PLAIN))
    for bad in ("", "two words", "é"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"gateway\.api_keys_file"):
            book.read(str(path), [KeySettings(name="x", digest=digest(ALICE))])
    keys, _ = book.read(write(path, PLAIN, BOB))
    assert (name_of(keys, BOB), [one.slot for one in keys.all] if keys else None) == ("key-2", [0, 1])


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    book, path = KeyBook(), tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text(PLAIN))
    writer.start()
    first, _ = book.read(str(path))
    writer.join()
    second, _ = book.read(str(path))
    assert name_of(first, PLAIN) == name_of(second, PLAIN) == "key-1"
    other = tmp_path / "other"
    os.mkfifo(other)
    with pytest.raises(ConfigError, match="contains no key"):  # without waiting for its writer
        book.read(str(path), [KeySettings(name="x", file=str(other))])


@pytest.mark.parametrize("has_writer", [False, True])
def test_a_pipe_that_is_never_closed_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_writer: bool
) -> None:
    monkeypatch.setattr(key_book, "PIPE_S", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR) if has_writer else -1
    try:
        if has_writer:
            os.write(held, PLAIN.encode())
        with pytest.raises(ConfigError, match=r"api_keys_file: .*/pipe can't be read: the writer of this pipe has not"):
            KeyBook().read(str(path))
    finally:
        if has_writer:
            os.close(held)


def test_two_names_with_one_key_are_an_error() -> None:
    tables = [KeySettings(name="alice", digest=digest(ALICE)), KeySettings(name="bob", digest=digest(ALICE))]
    with pytest.raises(ConfigError, match=r"keys\[1\]: 'bob' has the same key as 'alice'"):
        read("", {}, tables)


def test_gateways_read_replaced_keys(tmp_path: Path) -> None:
    keys = Keys.of([ALICE, BOB])
    fd = keys.share()
    try:
        fewer = Keys.of([PLAIN])
        fewer.write(fd)
        found = Keys.inherited(fd)
        assert found.scope_of(PLAIN) and found.scope_of(ALICE) is None
        os.pwrite(fd, bytes([os.pread(fd, 1, 40)[0] ^ 1]), 40)
        with pytest.raises(ValueError, match="are not valid keys"):
            Keys.inherited(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[keys]]\nname = "a b"\nfile = "x"', r"keys\[0\]\.name: needs 1 to 64 letters, digits"),
        ('[[keys]]\nname = "a"\ndigest = "12"', r"keys\[0\]\.digest: needs the key's SHA-256, 64 hexadecimal digits"),
        ('[[keys]]\nname = "a"\nfile = "x"\nrpm = -1', r"keys\[0\]\.rpm: expected `int` >= 0"),
        ('[[keys]]\nname = "a"\nfile = "x"\nrps = 1', r"keys\[0\]: object contains unknown field `rps`"),
        ('[[keys]]\nfile = "x"', r"keys\[0\]: object missing required field `name`"),
        ('[[keys]]\nname = "a"', r"keys: entry 0, 'a': needs digest"),
        ('[[keys]]\nname = "key-7"\nfile = "x"', r"keys: entry 0, 'key-7': keys without a name are called so"),
        ('[[keys]]\nname = "a"\nfile = "x"\n' * 2, r"keys: entry 1, 'a': an entry before it has the same name"),
        ("keys = 5", r"keys: needs a list, each entry a table with name, digest, file, rpm, tpm, models"),
    ],
)
def test_errors_name_the_entry_and_its_field(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(path)


def test_shown_keys_load_again(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f'[[keys]]\nname = "a"\ndigest = "{digest(ALICE)}"\nrpm = 3\nmodels = ["x", "y"]\n')
    settings = load(path)
    assert settings.keys == (KeySettings(name="a", digest=digest(ALICE), rpm=3, models=("x", "y")),)
    path.write_text(as_toml(settings))
    assert load(path) == settings == msgspec.convert(msgspec.to_builtins(settings), type(settings))
