"""A client without a key is known by its address, or by its IPv6 network."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.runtime.security.client_address import client_address


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (("192.0.2.7", 5000), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 5000, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::9", 5001, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:3::9", 5001, 0, 0), "2001:db8:1:3::/64"),
        (("fe80::1%eth0", 5000, 0, 2), "fe80::/64"),
        (("::ffff:192.0.2.7", 5000, 0, 0), "192.0.2.7"),
        ("", ""),
        (None, ""),
    ],
)
def test_an_address_names_a_client(peer: Any, expected: str) -> None:
    transport: Any = SimpleNamespace(get_extra_info=lambda name: peer if name == "peername" else None)
    assert client_address(transport) == expected


def test_a_closed_connection_has_none() -> None:
    assert client_address(None) == ""
