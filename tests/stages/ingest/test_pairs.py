"""The stage makes prompts of pairs of texts with a reranker's template, and refuses a wrong one at the start."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.pooler import Classifier, PairTemplates, Pooler
from tests.rig import Rig
from tests.stages.ingest import models as tiny

TEMPLATE = "{{ instruction or '?' }}|{{ query }}|{{ document }}<s>"
SCORED: dict[str, Any] = {"max_tokens": 1, "pooling": m.Pooling.LAST}


def reranker(folder: Path, template: str) -> Path:
    tiny.folder(folder, template)
    classifier = Classifier(labels=["LABEL_0"], activation="sigmoid")
    pooler = Pooler(pooling="last", width=1, classifier=classifier, pairs=PairTemplates(files=["chat_template.jinja"]))
    msgspec.structs.replace(ModelConfig.load(folder), pooler=pooler).save(folder)
    return folder


def test_a_pair_becomes_a_prompt_in_the_loop_or_in_a_thread(tmp_path: Path) -> None:
    with Rig("ingest", model_dir=reranker(tmp_path, TEMPLATE)) as rig:
        rig.start(tiny.facts(max_model_len=20_000))
        for length in (1, 9000):
            prompt = m.TextPrompt("q" * length, "d", '{"instruction": "i"}')
            rig.send(tiny.submit(prompt, request_id=length, **SCORED), "gateway.0")
            admit = rig.receive("schedule", m.Admit)
            text = f"i|{prompt.text}|d".encode()
            ids = memoryview(rig.bytes_of(admit.prompt_ids)).cast("i").tolist()
            assert len(ids) == len(text) + 1 and ids[-1] == tiny.byte_tokenizer().token_to_id("<s>")
            assert tiny.byte_tokenizer().decode(ids[:-1]).encode() == text
            assert rig.receive("gateway", m.Accepted).request_id == length


def test_a_template_without_both_texts_ends_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(
            UserError, match=r"does not write the content of the role 'document'\. Set chat_template to a file"
        ),
        Rig("ingest", model_dir=reranker(tmp_path, "{{ query }}")) as rig,
    ):
        rig.receive("supervisor", m.Ready)
