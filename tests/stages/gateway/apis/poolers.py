"""Models that don't generate: their poolers, the limits of requests to them, and the numbers that stages return."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.model.pooler import Classifier, PairTemplates, Pooler
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from tests.stages.gateway.gate import Gate

PROMPTS = {"query": "search: ", "document": "text: ", "Clustering": "group: "}
EMBEDDER = Pooler(pooling="mean", width=8, prompts=PROMPTS, matryoshka_dimensions=[2, 4])
CROSS_ENCODER = Pooler(pooling="cls", width=1, classifier=Classifier(labels=["LABEL_0"], activation="sigmoid"))
TEMPLATED = msgspec.structs.replace(
    CROSS_ENCODER, prompts={"web": "Look."}, default_prompt="web", pairs=PairTemplates(files=["chat_template.jinja"])
)
"""A reranker whose template makes prompts of pairs."""
CLASSIFIER = Pooler(pooling="cls", width=3, classifier=Classifier(labels=["bad", "so", "good"], activation="softmax"))
TAGGER = Pooler(pooling="all", width=2, classifier=Classifier(labels=["O", "NAME"], activation="softmax"))


def limits_of(pooler: Pooler) -> RequestLimits:
    return RequestLimits(
        model="tiny",
        max_sequences=64,
        max_prompt_tokens=512,
        vocab_size=1000,
        hidden_size=pooler.width,
        tasks=pooler.tasks,
        pooler=pooler,
    )


def gate_of(folder: Path, pooler: Pooler) -> Gate:
    return Gate(folder, pooler=pooler)


def give(gate: Gate, submit: m.Submit, numbers: Any) -> None:
    """The result of an input."""
    packed = np.asarray(numbers, "<f4").tobytes()
    gate.delta(submit, "?", token_outputs=packed, finish=m.Finish.LENGTH)
