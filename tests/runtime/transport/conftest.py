"""The fixture that tests of inboxes share."""

import pytest

from tests.runtime.transport.channels import Channels


@pytest.fixture
def channels():
    channels = Channels()
    yield channels
    channels.close()
