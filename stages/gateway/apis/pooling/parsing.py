"""Parses the bodies of POST /classify and /pooling. Pure."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from pipeline.http_server import request_ids
from pipeline.runtime import messages as m
from pipeline.runtime.model.pooler import Classifier, LogitActivation, Task
from pipeline.stages.gateway.apis.pooling.bodies import (
    POOLING_UNSUPPORTED_FIELDS,
    ClassifyBody,
    PoolingTaskBody,
)
from pipeline.stages.gateway.apis.pooling.reply import ClassifyDialect, PoolingDialect
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.parsing.bodies import with_unsupported
from pipeline.stages.gateway.parsing.build import check_task
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.parsed_request import EmbeddingOptions, ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.pooling import PoolingFields, embedding_options, inputs_of, pooling_request

_classifies = msgspec.json.Decoder(with_unsupported(ClassifyBody, POOLING_UNSUPPORTED_FIELDS))
_poolings = msgspec.json.Decoder(with_unsupported(PoolingTaskBody, POOLING_UNSUPPORTED_FIELDS))


def parse_classify(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /classify. Raises ApiError."""
    decoded = decode(_classifies, body, POOLING_UNSUPPORTED_FIELDS)
    check_task("classify", decoded.model, limits)
    classifier = _classifier_of(limits)
    return pooling_request(
        decoded,
        "classify",
        ClassifyDialect(classifier.labels, _activation(classifier, decoded.use_activation)),
        inputs_of(decoded.input, limits),
        "input",
        limits,
        request_id=request_ids.checked(decoded.request_id, "request_id"),
        add_special_tokens=decoded.add_special_tokens,
    )


def parse_pooling(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /pooling. Raises ApiError."""
    decoded = decode(_poolings, body, POOLING_UNSUPPORTED_FIELDS)
    own: Task = next((one for one in limits.tasks if one != "generate"), "embed")
    return task_request(
        decoded,
        decoded.task or own,
        inputs_of(decoded.input, limits),
        "input",
        limits,
        request_id=request_ids.checked(decoded.request_id, "request_id"),
        is_base64=decoded.encoding_format == "base64",
    )


class TaskFields(PoolingFields, Protocol):
    """What requests for any task can ask, over HTTP and ZeroMQ."""

    dimensions: int | None
    use_activation: bool | None
    add_special_tokens: bool | None


def task_request(
    fields: TaskFields,
    task: Task,
    make_prompts: Callable[[int | None], list[m.Prompt]],
    prompt_param: str,
    limits: RequestLimits,
    *,
    request_id: str | None = None,
    is_base64: bool = False,
    pooling: str | None = None,
    timings: bool = False,
) -> ParsedRequest:
    """A request of any task. Raises ApiError."""
    check_task(task, fields.model, limits)
    embedding: EmbeddingOptions | None = None
    activation: LogitActivation = "identity"
    if task in ("embed", "token_embed"):
        embedding = embedding_options(fields.dimensions, limits, normalize=fields.use_activation)
    else:
        if fields.dimensions is not None:
            raise invalid("dimensions", f"'dimensions' is not allowed with task {task}: only embeddings have them")
        activation = _activation(_classifier_of(limits), fields.use_activation)
    is_token_wise = task in ("token_embed", "token_classify")
    dialect = PoolingDialect(limits.hidden_size if is_token_wise else None, activation, is_base64)
    return pooling_request(
        fields,
        task,
        dialect,
        make_prompts,
        prompt_param,
        limits,
        request_id=request_id,
        add_special_tokens=fields.add_special_tokens,
        pooling=pooling,
        embedding=embedding,
        timings=timings,
    )


def _classifier_of(limits: RequestLimits) -> Classifier:
    assert limits.pooler.classifier is not None, "it has a task of classifiers"
    return limits.pooler.classifier


def _activation(classifier: Classifier, use_activation: bool | None) -> LogitActivation:
    return "identity" if use_activation is False else classifier.activation
