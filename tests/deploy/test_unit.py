"""The systemd unit of docs/deploy.md."""

from pathlib import Path

UNIT = Path(__file__).parents[2] / "docs" / "deploy" / "pipeline.service"
NEEDED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "RestrictNamespaces": "yes",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "CapabilityBoundingSet": "",
    "SystemCallArchitectures": "native",
    "SystemCallErrorNumber": "EPERM",
    "UMask": "0077",
    "DynamicUser": "yes",
    "CacheDirectory": "pipeline",
    "KillMode": "mixed",
    "OOMPolicy": "continue",
}


def test_it_keeps_its_hardening() -> None:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text("utf-8").splitlines():
        name, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    assert {name: found.get(name) for name in NEEDED} == {name: [value] for name, value in NEEDED.items()}
    assert found["SystemCallFilter"] == ["@system-service", "~@privileged"]
    assert "MemoryDenyWriteExecute" not in found, "PyTorch's oneDNN makes code at run time"
