"""Fixtures with the server's address, for files that run outside the project's environment."""

import os

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["PIPELINE_URL"]


@pytest.fixture(scope="session")
def model() -> str:
    return os.environ["PIPELINE_MODEL"]
