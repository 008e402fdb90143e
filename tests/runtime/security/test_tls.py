"""The certificate files of the HTTP listener: each mistake is an error that names the setting."""

import os
import ssl
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load
from pipeline.config.load import ConfigError
from pipeline.config.settings import GatewaySettings
from pipeline.runtime.security.tls import server_context

TLS = Path(__file__).parents[2] / "data" / "tls"
CERT, KEY, CA = (str(TLS / name) for name in ("server.pem", "server.key", "ca.pem"))


def test_without_a_certificate_there_is_no_context() -> None:
    assert server_context(GatewaySettings()) is None


def test_one_file_may_hold_the_key_and_the_certificate(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(KEY).read_text() + Path(CERT).read_text())
    context = server_context(GatewaySettings(ssl_certfile=str(both)))
    assert context is not None
    assert context.verify_mode == ssl.CERT_NONE
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION
    context = server_context(GatewaySettings(ssl_certfile=str(both), ssl_ca_certs=CA))
    assert context is not None and context.verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"ssl_certfile": "/nowhere"}, "gateway.ssl_certfile: /nowhere can't be read: No such file or directory"),
        ({"ssl_certfile": KEY}, f"gateway.ssl_certfile: {KEY} contains no certificate in PEM format"),
        (
            {"ssl_certfile": CERT},
            "gateway.ssl_certfile: "
            + CERT
            + " contains no private key in PEM format (-----BEGIN …); name its file in gateway.ssl_keyfile",
        ),
        ({"ssl_certfile": CERT, "ssl_keyfile": "/nowhere"}, "gateway.ssl_keyfile: /nowhere can't be read"),
        ({"ssl_certfile": CERT, "ssl_keyfile": CA}, f"gateway.ssl_keyfile: {CA} contains no private key"),
        (
            {"ssl_certfile": CERT, "ssl_keyfile": str(TLS / "client.key")},
            f"gateway.ssl_keyfile: the private key in {TLS / 'client.key'} does not belong to the certificate",
        ),
        (
            {"ssl_certfile": CERT, "ssl_keyfile": str(TLS / "encrypted.key")},
            f"gateway.ssl_keyfile: the private key in {TLS / 'encrypted.key'} is encrypted: decrypt it",
        ),
        (
            {"ssl_certfile": CERT, "ssl_keyfile": KEY, "ssl_ca_certs": KEY},
            f"gateway.ssl_ca_certs: {KEY} contains no certificate",
        ),
    ],
)
def test_each_mistake_names_the_setting(files: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        server_context(GatewaySettings(**files))
    assert raised.value.problems[0].startswith(words)


def test_a_damaged_certificate_is_an_error(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match=r"gateway\.ssl_certfile: .*damaged\.pem and its private key can't be used"):
        server_context(GatewaySettings(ssl_certfile=str(damaged), ssl_keyfile=KEY))
    with pytest.raises(ConfigError, match=r"gateway\.ssl_ca_certs: .*damaged\.pem can't be used"):
        server_context(GatewaySettings(ssl_certfile=CERT, ssl_keyfile=KEY, ssl_ca_certs=str(damaged)))


def test_a_key_without_a_certificate_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.ssl_keyfile: needs the server's certificate"):
        load.load(sets=[f"gateway.ssl_keyfile={KEY}"])


def test_a_fifo_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    """Each gateway that replaces another one reads the files again."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match=r"ssl_certfile: .*a FIFO, not a regular file"):
        server_context(GatewaySettings(ssl_certfile=str(tmp_path / "fifo")))
