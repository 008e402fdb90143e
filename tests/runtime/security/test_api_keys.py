"""Sources of API keys, and how a client's key is compared."""

import hashlib
import hmac
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.load import ConfigError, load
from pipeline.runtime.security import api_keys
from pipeline.runtime.security.api_keys import MAX_KEY_CHARS, MAX_KEYS, Keys, bearer
from pipeline.runtime.security.key_book import read
from pipeline.supervisor.shared import bind_policy

LONG = "sk-0123456789abcdef0123456789"
OTHER = "token/with+all=the~signs.of_RFC-6750"


def test_only_listed_keys_are_admitted() -> None:
    keys = Keys.of([LONG, OTHER])
    assert None not in (keys.scope_of(LONG), keys.scope_of(OTHER))
    for wrong in (None, "", LONG[:-1], LONG + "x", LONG.upper(), f" {LONG}", "é", "\udcff", "x" * 10_000):
        assert keys.scope_of(wrong) is None


def test_all_keys_are_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing must not reveal which key was similar, or how far it matched."""
    keys = Keys.of([f"{LONG}{i}" for i in range(7)])
    seen: list[tuple[int, int]] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append((len(a), len(b))) or compare(a, b))
    for shown in (f"{LONG}0", f"{LONG}6", "x", None):
        seen.clear()
        keys.scope_of(shown)
        assert seen == [(32, 32)] * 7


def test_shared_keys_are_hashed() -> None:
    keys = Keys.of([LONG, OTHER, LONG])
    assert len(keys) == 2
    fd = keys.share()
    try:
        data = os.pread(fd, 10_000, 0)
        assert LONG.encode() not in data and hashlib.sha256(LONG.encode()).digest() not in data
        for _ in range(2):  # replicas read the same descriptor
            assert Keys.inherited(fd).scope_of(OTHER) and Keys.inherited(fd).scope_of(OTHER[1:]) is None
    finally:
        os.close(fd)
    assert LONG not in repr(keys) and LONG not in repr(vars(keys))
    assert Keys.of([LONG]).share() and vars(Keys.of([LONG])) != vars(Keys.of([LONG]))  # each start has its own salt


def test_an_invalid_key_list_is_never_treated_as_empty() -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    fd = os.memfd_create("empty")
    try:
        with pytest.raises(ValueError, match="0 bytes are not valid keys"):
            Keys.inherited(fd)
        with pytest.raises(OSError):
            Keys.inherited(read_end)
    finally:
        os.close(fd)
        os.close(read_end)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([f"Bearer {LONG}"], LONG),
        ([f"bearer   {LONG} "], LONG),
        ([f"BEARER {OTHER}"], OTHER),
        ([], None),
        ([LONG], None),
        ([f"Basic {LONG}"], None),
        (["Bearer"], None),
        (["Bearer "], None),
        ([f"Bearer {LONG} {LONG}"], None),
        ([f"Bearer {LONG}", f"Bearer {LONG}"], None),
        (["Bearer " + "x" * (MAX_KEY_CHARS + 1)], None),
        (["Bearer ké"], None),
    ],
)
def test_the_key_of_a_header(headers: list[str], key: str | None) -> None:
    assert bearer(headers) == key


def test_a_file_has_one_key_per_line_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# of the team\r\n{LONG}\r\n\n  {OTHER}  \n # {'x' * 20}\n", "utf-8-sig")
    path.chmod(0o600)
    keys, warnings = read(str(path), {})
    assert keys is not None and len(keys) == 2 and warnings == []
    assert None not in (keys.scope_of(LONG), keys.scope_of(OTHER)) and keys.scope_of("x" * 20) is None


def test_the_environment_adds_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(LONG)
    path.chmod(0o600)
    keys, _ = read(str(path), {"PIPELINE_API_KEYS": f"{OTHER},{OTHER}2\n{OTHER}3,"})
    assert keys is not None and len(keys) == 4 and keys.scope_of(LONG) and keys.scope_of(f"{OTHER}3")
    assert read("", {}) == (None, [])


def test_world_readable_files_and_guessable_keys_cause_warnings(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{LONG}\nsecret\n")
    path.chmod(0o644)
    _, warnings = read(str(path), {})
    assert len(warnings) == 2 and "chmod 600" in warnings[0] and "1 of 2 API keys" in warnings[1]
    assert not [word for word in warnings if "secret" in word]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "contains no key"),
        (b"# only this\n\n", "contains no key"),
        (b"good-key\nsecret key\n", "line 2: a key must have 1 to 512 visible ASCII characters"),
        (b"secret,one\n", "line 1: "),
        ("sécret\n".encode(), "line 1: "),
        (b"x" * 513, "line 1: "),
        (b"secret\x00one", "line 1: "),
        (b"\xff\xfe\x00secret", "is not text"),
        (b"\n".join(b"key-%d" % i for i in range(MAX_KEYS + 1)), "the limit is 1024"),
        (b"#" * (1024**2 + 1), "is larger than"),
    ],
)
def test_an_invalid_file_is_rejected_without_quoting_it(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"gateway.api_keys_file") as error:
        read(str(path), {})
    assert words in str(error.value) and not re.search("secr|sécr|key-1", str(error.value))


def test_a_missing_file_and_an_empty_variable_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read(str(tmp_path / "none"), {})
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        read(str(tmp_path), {})
    for empty in ("", " , \n"):
        with pytest.raises(ConfigError, match="PIPELINE_API_KEYS: contains no key"):
            read("", {"PIPELINE_API_KEYS": empty})


def test_a_client_sends_the_given_key_or_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_API_KEY", OTHER)
    assert (api_keys.of_client(LONG), api_keys.of_client(None)) == (LONG, OTHER)
    monkeypatch.setenv("PIPELINE_API_KEY", "")
    assert api_keys.of_client(None) is None


# -------------------------------------------------------------------------------------------------------- bind policy


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost", "::ffff:127.0.0.1", "127.1"])
def test_loopback_needs_no_keys(host: str) -> None:
    bind_policy.check(load(sets=[f'gateway.host="{host}"']), has_keys=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "192.168.1.5", "fe80::1", "::ffff:10.0.0.1", "8.8.8.8"])
def test_beyond_this_machine_a_server_needs_keys_or_allow_unauthenticated(host: str) -> None:
    settings = load(sets=[f'gateway.host="{host}"'])
    with pytest.raises(
        ConfigError, match=r"gateway\.host: .*api_keys_file.*PIPELINE_API_KEYS.*allow_unauthenticated = true"
    ):
        bind_policy.check(settings, has_keys=False)
    bind_policy.check(settings, has_keys=True)
    bind_policy.check(load(sets=[f'gateway.host="{host}"', "gateway.allow_unauthenticated=true"]), has_keys=False)


def test_a_name_is_loopback_only_if_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"home": ["127.0.0.1", "::1"], "both": ["127.0.0.1", "10.1.2.3"]}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(0, 0, 0, "", (one, 0)) for one in known[host]])
    assert bind_policy.is_loopback("home") and not bind_policy.is_loopback("both")


def test_an_unresolvable_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.invalid:8000: .* gateway.host"):
        bind_policy.check(load(sets=['gateway.host="no.such.invalid"']), has_keys=False)


@pytest.mark.parametrize(
    ("zmq", "is_open"),
    [
        ("auto", False),
        ("off", False),
        ("ipc://@x", False),
        ("tcp://127.0.0.1:9", False),
        ("tcp://[::1]:9", False),
        ("tcp://localhost:9", False),
        ("tcp://*:9", True),
        ("tcp://0.0.0.0:9", True),
        ("tcp://[::]:9", True),
        ("tcp://eth0:9", True),
        ("tcp://127.example.com:9", True),
    ],
)
def test_the_zeromq_address_follows_the_same_policy(zmq: str, is_open: bool) -> None:
    settings = load(sets=[f'gateway.zmq="{zmq}"'])
    if is_open:
        with pytest.raises(ConfigError, match=r"gateway\.zmq: .*api_keys_file"):
            bind_policy.check(settings, has_keys=False)
    bind_policy.check(settings, has_keys=is_open)


def test_a_server_open_to_others_suggests_allowed_hosts() -> None:
    def hint(*sets: str, has_keys: bool = False) -> str | None:
        return bind_policy.hint(load(sets=["gateway.allow_unauthenticated=true", *sets]), has_keys)

    found = hint("gateway.host=0.0.0.0")
    assert found is not None and "gateway.allowed_hosts" in found
    assert hint("gateway.host=0.0.0.0", has_keys=True) is None
    assert hint("gateway.host=0.0.0.0", "gateway.allowed_hosts=a.example") is None
    assert hint() is None


CRASH = """
import os, pathlib, resource, signal, sys
from pipeline.runtime.security import api_keys
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
if sys.argv[1] == "kept out":
    api_keys.keep_out_of_core_dumps()
    assert resource.getrlimit(resource.RLIMIT_CORE) == (min(1, hard) if hard >= 0 else 1, hard)
    assert int(pathlib.Path("/proc/self/coredump_filter").read_text(), 16) == 0
if os.fork() == 0:  # a stage inherits the limit of its parent
    os.abort()
assert os.WIFSIGNALED(status := os.wait()[1])
print("dumped" if os.WCOREDUMP(status) else "no dump")
"""


def test_a_process_that_holds_keys_leaves_no_core_dump(tmp_path: Path) -> None:
    def crash(how: str) -> str:
        command = [sys.executable, "-c", CRASH, how]
        environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environ)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert crash("kept out") == "no dump"
    assert not list(tmp_path.iterdir())
    assert crash("as it is") in ("dumped", "no dump")  # the machine's default
