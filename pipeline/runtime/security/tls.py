"""TLS for the HTTP listener: reads the certificate files of gateway.ssl_certfile, ssl_keyfile and ssl_ca_certs.

The supervisor reads them once at start, so that errors name the setting, and each gateway reads them again.
"""

import ssl
from pathlib import Path

from pipeline.config.load import ConfigError
from pipeline.config.settings import GatewaySettings
from pipeline.runtime.files.regular_files import read_regular

CERTFILE, KEYFILE, CA_CERTS = "gateway.ssl_certfile", "gateway.ssl_keyfile", "gateway.ssl_ca_certs"

MAX_FILE_BYTES = 16 * 1024**2
"""A bundle of all public certificate authorities has a quarter of a megabyte."""


class _NeedsPassword(Exception):
    """The private key is encrypted."""


def server_context(settings: GatewaySettings) -> ssl.SSLContext | None:
    """The TLS context of the HTTP listener; None for plain HTTP. Raises ConfigError, which names the setting whose file
    is wrong."""
    if not settings.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # OpenSSL before 3 lets a client ask for a handshake with each byte
    context.set_alpn_protocols(["http/1.1"])
    certfile, keyfile = Path(settings.ssl_certfile), Path(settings.ssl_keyfile or settings.ssl_certfile)
    _require_pem(CERTFILE, certfile, "CERTIFICATE-----", "a certificate")
    key = KEYFILE if settings.ssl_keyfile else CERTFILE
    _require_pem(
        key, keyfile, "PRIVATE KEY-----", "a private key", f"; name its file in {KEYFILE}" if key != KEYFILE else ""
    )
    try:
        context.load_cert_chain(certfile, keyfile, password=_refuse_password)
    except _NeedsPassword:
        how = f"`openssl pkey -in {keyfile} -out FILE`"
        raise ConfigError([f"{key}: the private key in {keyfile} is encrypted: decrypt it, as with {how}"]) from None
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            problem = f"{key}: the private key in {keyfile} does not belong to the certificate in {certfile}"
        else:
            problem = f"{CERTFILE}: {certfile} and its private key can't be used: {error.reason or error}"
        raise ConfigError([problem]) from error
    if settings.ssl_ca_certs:
        ca_certs = Path(settings.ssl_ca_certs)
        _require_pem(CA_CERTS, ca_certs, "CERTIFICATE-----", "a certificate")
        try:
            context.load_verify_locations(ca_certs)
        except ssl.SSLError as error:
            raise ConfigError([f"{CA_CERTS}: {ca_certs} can't be used: {error.reason or error}"]) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _require_pem(key: str, path: Path, mark: str, what: str, advice: str = "") -> None:
    """Raises ConfigError if a file can't be read or has no PEM block of its kind. The ssl module names neither the file
    nor the reason."""
    try:
        data = read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError([f"{key}: {path} can't be read: {error.strerror}"]) from error
    if mark.encode() not in data:
        raise ConfigError([f"{key}: {path} contains no {what.removeprefix('a ')} in PEM format (-----BEGIN …){advice}"])


def _refuse_password() -> str:
    """Called for the password of an encrypted key. Without it, the ssl module would ask at the terminal."""
    raise _NeedsPassword
