"""Which URLs of images are fetched, and which addresses are connected to."""

import pytest

from pipeline.stages.gateway.media.urls import MAX_URL_CHARS, checked_url, is_public

ALLOWED = ("images.example", "*.cdn.example", "xn--bcher-kva.example")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("https://images.example/a.png", "https://images.example/a.png"),
        ("HTTPS://IMAGES.example:443/a?b=c#d", "https://images.example/a?b=c"),
        ("https://a.b.cdn.example/%20", "https://a.b.cdn.example/%20"),
        ("https://bücher.example/", "https://xn--bcher-kva.example/"),
    ],
)
def test_urls_of_allowed_hosts_are_fetched(text: str, same: str) -> None:
    assert str(checked_url(text, ALLOWED).with_host(checked_url(text, ALLOWED).raw_host or "")) in (same, text)
    assert checked_url(text, ALLOWED).fragment == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://images.example/", "is not an https: URL"),
        ("file:///etc/passwd", "is not an https: URL"),
        ("https://other.example/", "'other.example', which is not in gateway.allowed_media_domains"),
        ("https://cdn.example/", "not in gateway.allowed_media_domains"),
        ("https://images.example.evil.org/", "not in gateway.allowed_media_domains"),
        ("https://evil-images.example/", "not in gateway.allowed_media_domains"),
        ("https://images.example@evil.org/", "has a user name or a password"),
        ("https://images.example:pw@images.example/", "has a user name or a password"),
        ("https://evil.org\\@images.example/", "a backslash"),
        ("https://images.example\\.evil.org/", "a backslash"),
        ("https://images.example/\n", "a control character"),
        ("https://images.example/a b", "a space"),
        ("https://images.example:8443/", "has port 8443"),
        ("https://images.example:99999/", "is no valid URL"),
        ("https://127.0.0.1/", "has an IP address"),
        ("https://[::1]/", "has an IP address"),
        ("https://images.example./", "has no valid host name"),
        ("https://images%2eexample/", "has no valid host name"),
        ("https:///a", "has no valid host name"),
        ("https://images.example/" + "a" * MAX_URL_CHARS, f"a URL can have {MAX_URL_CHARS}"),
        ("https://2130706433/", "not in gateway.allowed_media_domains"),
    ],
)
def test_others_are_refused_in_our_words(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"^(is|has) ") as raised:
        checked_url(text, ALLOWED)
    assert why in str(raised.value)


def test_any_host_may_be_allowed_but_no_address() -> None:
    assert checked_url("https://some.example/", ("*",)).host == "some.example"
    with pytest.raises(ValueError, match="has an IP address"):
        checked_url("https://8.8.8.8/", ("*",))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff0e::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1",
        "2002:7f00:1::", "2001:0:a00:1::1",
        "::7f00:1", "::ffff:0:7f00:1", "64:ff9b:1::7f00:1", "fec0::1", "5f00::1",
        "2001:db8::1", "3fff::1", "192.0.0.192", "168.63.129.16", "::ffff:168.63.129.16",
        "localhost", "", "1.2.3",
    ],
)  # fmt: skip
def test_addresses_that_are_not_of_the_internet_are_not_connected_to(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are(address: str) -> None:
    assert is_public(address)
