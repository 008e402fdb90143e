"""Each key of [limits] that ingest reads changes its replies."""

from pathlib import Path

import pytest

from pipeline.config.settings import LimitSettings, Settings
from pipeline.runtime import messages as m
from tests.rig import Rig
from tests.stages.ingest import models as tiny
from tests.stages.ingest.test_grammar_checker import ENDLESS

LONG_TEMPLATE = "{% for i in range(1000) %}{% for j in range(300) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
NUM_TRIES = 10


@pytest.mark.parametrize(("template_timeout_s", "is_in_time"), [(0.1, False), (60.0, True)])
def test_template_timeout_s_limits_a_template(tmp_path: Path, template_timeout_s: float, is_in_time: bool) -> None:
    """A second is at most a million steps on any machine."""
    settings = Settings(limits=LimitSettings(template_timeout_s=template_timeout_s))
    with Rig("ingest", settings, tiny.folder(tmp_path, LONG_TEMPLATE)) as rig:
        rig.start(tiny.facts())
        rig.send(tiny.submit(tiny.chat("hi")), "gateway.0")
        answer = rig.receive("gateway")
        assert isinstance(answer, m.Accepted if is_in_time else m.Rejected), answer
        if isinstance(answer, m.Rejected):
            assert "longer than 0.1 s" in answer.failure.message


@pytest.mark.parametrize("grammar_timeout_s", [0.2, 0.4])
def test_grammar_timeout_s_limits_the_check_of_a_grammar(tmp_path: Path, grammar_timeout_s: float) -> None:
    """On a busy machine a timeout does not mean that the grammar is bad, so the client may send it again."""
    settings = Settings(limits=LimitSettings(grammar_timeout_s=grammar_timeout_s))
    with Rig("ingest", settings, tiny.folder(tmp_path)) as rig:
        rig.start(tiny.facts())
        for number in range(NUM_TRIES):
            grammar = m.Grammar("grammar", f"{ENDLESS}\n// {number}")
            rig.send(tiny.submit(tiny.chat("hi"), grammar=grammar), "gateway.0")
            failure = rig.receive("gateway", m.Rejected).failure
            if failure.status == 400:
                break
        assert f"longer than {grammar_timeout_s:g} s" in failure.message
