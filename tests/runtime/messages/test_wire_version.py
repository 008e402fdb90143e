"""The version of the messages between stages."""

from typing import Any

import msgspec
import pytest

from pipeline.errors import UserError
from pipeline.runtime import child
from pipeline.runtime.messages import wire_version


def version_of(monkeypatch: pytest.MonkeyPatch, *roots: object) -> str:
    monkeypatch.setattr(wire_version, "ROOTS", roots)
    return wire_version.wire_version()


class Inner(msgspec.Struct, array_like=True, tag="inner"):
    value: int


class Outer(msgspec.Struct, array_like=True, tag="outer"):
    inner: list[Inner | None]
    more: dict[str, int] = {}


def test_it_is_the_same_for_the_same_messages() -> None:
    assert wire_version.wire_version() == wire_version.wire_version()


@pytest.mark.parametrize(
    ("name", "fields", "tag"),
    [
        ("another type", [("value", str)], "inner"),
        ("another name", [("number", int)], "inner"),
        ("another field", [("value", int), ("more", int, 0)], "inner"),
        ("another tag", [("value", int)], "other"),
        ("a default", [("value", int, 0)], "inner"),
    ],
)
def test_a_changed_field_in_a_field_is_another_version(
    monkeypatch: pytest.MonkeyPatch, name: str, fields: list[Any], tag: str
) -> None:
    before = version_of(monkeypatch, Outer)
    assert version_of(monkeypatch, outer_with(fields, tag)) != before
    assert version_of(monkeypatch, outer_with([("value", int)], "inner")) == before


def outer_with(fields: list[Any], tag: str) -> Any:
    """`Outer` with another `Inner`."""
    inner: Any = msgspec.defstruct("Inner", fields, array_like=True, tag=tag)
    more = ("more", dict[str, int], {})
    return msgspec.defstruct("Outer", [("inner", list[inner | None]), more], array_like=True, tag="outer")


def test_a_process_of_other_code_refuses_to_join() -> None:
    child._check_version(wire_version.wire_version())
    with pytest.raises(UserError, match="restart the whole server"):
        child._check_version("0123456789abcdef")
