"""Host names and origins: one canonical spelling for each, and settings errors that name the entry."""

import pytest

from pipeline.config.load import ConfigError, load
from pipeline.config.values.browsers import (
    Authority,
    Origin,
    is_listed,
    normalized_host,
    parse_authority,
    parse_origin,
)


@pytest.mark.parametrize(
    ("text", "authority"),
    [
        ("localhost", Authority("localhost")),
        ("LocalHost.:8000", Authority("localhost", 8000)),
        ("localhost:", Authority("localhost")),
        ("127.0.0.1:80", Authority("127.0.0.1", 80)),
        ("[0:0::1]:8000", Authority("::1", 8000)),
        ("a_b.example", Authority("a_b.example")),
    ],
)
def test_an_authority_has_one_canonical_spelling(text: str, authority: Authority) -> None:
    assert parse_authority(text) == authority


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        ":80",
        "::1",
        "[::1",
        "[x]",
        "a b",
        "a/b",
        "user@localhost",
        "a:b",
        "a:65536",
        "a:80:80",
        "ü",
        "a,b",
        "a\n",
    ],
)
def test_an_invalid_authority_is_none(text: str) -> None:
    assert parse_authority(text) is None


def test_ip_addresses_are_recognized_only_as_literals() -> None:
    assert {text: Authority(text).is_ip for text in ("127.0.0.1", "::1", "10.0.0.7")} == dict.fromkeys(
        ("127.0.0.1", "::1", "10.0.0.7"), True
    )
    assert not any(Authority(text).is_ip for text in ("127.0.0.1.evil.example", "localhost", "1.2.3", "2130706433"))


def test_origins_have_one_canonical_spelling() -> None:
    assert parse_origin("HTTP://LocalHost") == parse_origin("http://localhost:80") == Origin("http", "localhost", 80)
    assert parse_origin("https://a.example") == Origin("https", "a.example", 443)
    assert parse_origin("chrome-extension://abcdef") == Origin("chrome-extension", "abcdef", None)
    for text in (
        "null",
        "",
        "localhost",
        "http://",
        "http://a/",
        "http://a/b",
        "http://u@a",
        "file://",
        "//a",
        "http:a",
    ):
        assert parse_origin(text) is None, text


def test_a_listed_name_matches_whole_or_as_a_wildcard() -> None:
    allowed = frozenset(
        found for entry in ("A.Example.", "*.svc.local") if (found := normalized_host(entry)) is not None
    )
    assert is_listed("a.example", allowed) and is_listed("x.svc.local", allowed) and is_listed("x.y.svc.local", allowed)
    for host in ("b.a.example", "svc.local", "xsvc.local", "example", "a.example.evil.test"):
        assert not is_listed(host, allowed), host
    assert is_listed("anything", frozenset("*"))


def test_lists_can_be_set_on_the_command_line() -> None:
    gateway = load(sets=["gateway.allowed_hosts=a.example, *.b.example", 'gateway.allowed_origins=["*"]']).gateway
    assert (gateway.allowed_hosts, gateway.allowed_origins) == (("a.example", "*.b.example"), ("*",))


@pytest.mark.parametrize("entry", ["a:80", "http://a", "a/b", "", "*a", "a.*", "[::1]:80", "a b"])
def test_an_invalid_host_is_an_error_that_names_it(entry: str) -> None:
    with pytest.raises(ConfigError, match=r'gateway\.allowed_hosts: ".*" is not a host name') as error:
        load(tables={"a test": {"gateway": {"allowed_hosts": ["fine", entry]}}})
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("entry", ["null", "a.example", "http://a/", "http://*.a", ""])
def test_an_invalid_origin_is_an_error_that_names_it(entry: str) -> None:
    with pytest.raises(ConfigError, match=r'gateway\.allowed_origins: ".*" is not an origin'):
        load(tables={"a test": {"gateway": {"allowed_origins": [entry]}}})
