"""Addresses of the ZeroMQ server, and the errors for those it cannot listen on."""

import socket
from contextlib import nullcontext
from pathlib import Path

import pytest

from pipeline.client.connection.zmq_address import address_of, check_free, old_address
from pipeline.config.load import ConfigError, load
from pipeline.config.values.zmq_setting import is_open_to_others, problem_of
from pipeline.errors import UserError
from pipeline.supervisor.shared import bind_policy


@pytest.mark.parametrize(
    ("setting", "replica", "address"),
    [
        ("off", 0, None),
        ("off", 1, None),
        ("auto", 0, "ipc://@pipeline/8000/zmq"),
        ("auto", 2, "ipc://@pipeline/8000/zmq.2"),
        ("ipc:///run/door", 1, "ipc:///run/door.1"),
        ("tcp://127.0.0.1:9000", 0, "tcp://127.0.0.1:9000"),
        ("tcp://127.0.0.1:9000", 3, "tcp://127.0.0.1:9003"),
        ("tcp://localhost:9000", 0, "tcp://127.0.0.1:9000"),
        ("tcp://[::1]:9000", 1, "tcp://[::1]:9001"),
    ],
)
def test_each_gateway_has_its_own_address(setting: str, replica: int, address: str | None) -> None:
    assert problem_of(setting) == ""
    assert address_of(setting, 8000, replica) == address


@pytest.mark.parametrize(
    ("address", "old"),
    [
        ("ipc://@pipeline/8000/zmq", "ipc://@pipeline/8000/door"),
        ("ipc://@pipeline/8000/zmq.2", "ipc://@pipeline/8000/door.2"),
        ("ipc://@pipeline/1-ab/zmq", None),
        ("ipc:///run/zmq", None),
        ("tcp://127.0.0.1:9000", None),
    ],
)
def test_only_the_default_address_has_an_old_name(address: str, old: str | None) -> None:
    assert old_address(address) == old


@pytest.mark.parametrize(
    "setting",
    "|on|8001|localhost:8001|tcp://|tcp://host|tcp://host:|tcp://:9000|tcp://host:0|tcp://host:70000|tcp://host:٣|"
    f"udp://host:9000|ipc://|ipc://@|inproc://x|ipc://{'x' * 105}".split("|"),
)
def test_an_invalid_address_is_reported_with_the_key(setting: str) -> None:
    assert problem_of(setting).startswith("gateway.zmq: ")
    with pytest.raises(ConfigError, match=r"gateway\.zmq"):
        load(None, [f"gateway.zmq={setting}"])
    with pytest.raises(UserError, match=r"gateway\.zmq"):
        address_of(setting, 8000)


@pytest.mark.parametrize(
    ("setting", "is_open"),
    [
        *(
            (one, False)
            for one in ["auto", "off", "ipc://x", "tcp://127.0.0.1:9", "tcp://localhost:9", "tcp://[::1]:9"]
        ),
        *((one, True) for one in ["tcp://*:9", "tcp://0.0.0.0:9", "tcp://10.0.0.1:9"]),
    ],
)
def test_a_remote_address_requires_keys_or_allow_unauthenticated(setting: str, is_open: bool) -> None:
    assert is_open_to_others(setting) == is_open
    settings = load(None, [f"gateway.zmq={setting}"])
    bind_policy.check(settings, has_keys=True)
    bind_policy.check(load(None, [f"gateway.zmq={setting}", "gateway.allow_unauthenticated=true"]), has_keys=False)
    with pytest.raises(ConfigError, match=r"gateway\.zmq") if is_open else nullcontext():
        bind_policy.check(settings, has_keys=False)


class TestCheckFree:
    def test_a_free_address_passes(self, tmp_path: Path) -> None:
        check_free(f"ipc://{tmp_path}/door")
        check_free("ipc://@pipeline/test_door_address/free")
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
        check_free(f"tcp://127.0.0.1:{port}")

    def test_a_used_port_is_rejected(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as one:
            address = f"tcp://127.0.0.1:{one.getsockname()[1]}"
            with pytest.raises(OSError, match=f"cannot listen on {address}: Address already in use; choose another"):
                check_free(address)

    @pytest.mark.parametrize("is_abstract", [False, True])
    def test_a_used_unix_socket_is_rejected_and_a_stale_one_passes(self, tmp_path: Path, is_abstract: bool) -> None:
        path = str(tmp_path / "door")
        address = f"ipc://@{path}" if is_abstract else f"ipc://{path}"
        with socket.socket(socket.AF_UNIX) as one:
            one.bind("\0" + path if is_abstract else path)
            one.listen()
            with pytest.raises(OSError, match="Address already in use"):
                check_free(address)
        check_free(address)  # the file still exists, without a listener

    def test_a_file_that_is_no_socket_is_rejected_and_kept(self, tmp_path: Path) -> None:
        precious = tmp_path / "thesis.tex"
        precious.write_text("x")
        with pytest.raises(OSError, match="File exists"):
            check_free(f"ipc://{precious}")
        assert precious.read_text() == "x"

    def test_a_missing_folder_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="No such file or directory"):
            check_free(f"ipc://{tmp_path}/none/door")

    def test_a_host_of_another_machine_is_rejected(self) -> None:
        with pytest.raises(OSError, match=r"cannot listen on tcp://192\.0\.2\.1:9: "):
            check_free("tcp://192.0.2.1:9")
