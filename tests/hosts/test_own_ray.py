"""The environment of our own Ray cluster. tests/e2e/hosts/test_deploy.py looks at a real one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.hosts import own_ray

ROOT = Path(__file__).resolve().parents[2]


def test_each_cluster_has_a_token_that_only_its_user_can_read_and_that_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    before = dict(os.environ)
    tokens = []
    for _ in range(2):
        with own_ray.environment():
            assert os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in os.environ
            path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
            assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
            tokens.append(path.read_text())
            assert len(tokens[-1]) == 2 * own_ray.TOKEN_BYTES
        assert not path.parent.exists() and dict(os.environ) == before
    assert tokens[0] != tokens[1]


def test_ray_takes_the_loopback_address_and_the_token_from_it() -> None:
    """By the functions that `ray.init` calls, without starting Ray's processes."""
    code = (
        "from pipeline.hosts import own_ray\n"
        "with own_ray.environment():\n"
        "    import ray\n"
        "    from ray._private import services\n"
        "    from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode\n"
        "    token = open(__import__('os').environ['RAY_AUTH_TOKEN_PATH']).read()\n"
        "    assert AuthenticationTokenLoader.instance().get_raw_token(True) == token\n"
        "    print(services.get_node_ip_address(), get_authentication_mode() == AuthenticationMode.TOKEN)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.stdout.split() == ["127.0.0.1", "True"], done.stderr
