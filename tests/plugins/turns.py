"""A pytest plugin that collects tests at once and runs them in their turn: pytest -p tests.plugins.turns --wait-fd 5

tools/check starts a group of tests beside the group before it, because to import and to collect takes one core some
seconds while the other would be idle.
"""

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wait-fd", type=int, required=True, help="run tests when it can be read, or has ended")


def pytest_configure(config: pytest.Config) -> None:
    os.set_inheritable(config.option.wait_fd, False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    os.read(session.config.option.wait_fd, 1)
