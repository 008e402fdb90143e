"""The end of a long prompt, which shows whether a reply begins inside of its reasoning."""

import json
from pathlib import Path

import msgspec
import pytest

from pipeline.config.settings import ChatSettings, Settings
from pipeline.runtime import messages as m
from tests.rig import Rig
from tests.stages.ingest import models as tiny
from tests.stages.ingest.test_reply_grammar import TEMPLATE

NUM_IDS = 48
"""Tokens of the tail. The tiny model has one for each byte."""


@pytest.mark.parametrize(("thinks", "end"), [("yes", "assistant:<think>\n"), ("no", "<think>\n\n</think>\n\n")])
@pytest.mark.parametrize("num_letters", [1, NUM_IDS, 150])
def test_the_tail_is_the_end_of_a_prompt_of_any_length(tmp_path: Path, thinks: str, end: str, num_letters: int) -> None:
    text = "".join(chr(ord("a") + place % 26) for place in range(num_letters))
    prompt = m.ChatPrompt([m.ChatMessage("user", text)], template_kwargs=json.dumps({"thinks": thinks}))
    submitted = tiny.submit(prompt)
    options = msgspec.structs.replace(submitted.prompt_options, with_tail=True)
    settings = Settings(chat=ChatSettings(reasoning_parser="qwen3"))
    with Rig("ingest", settings, model_dir=tiny.folder(tmp_path, TEMPLATE)) as rig:
        rig.start(tiny.facts(max_model_len=512))
        rig.send(msgspec.structs.replace(submitted, prompt_options=options), "gateway.0")
        tail = rig.receive("gateway", m.Accepted).tail
    start = "<think>\n" if thinks == "yes" else "<think>\n\n</think>\n\n"
    whole = f"user:{text}\nassistant:{start}"
    assert tail == whole[-NUM_IDS:]
    assert tail.endswith(end)
