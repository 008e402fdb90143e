"""Errors with the field names of Ollama's API."""

from pipeline.stages.gateway.apis.ollama.fields import OllamaFields
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.field_names import FieldNames

_SHARED = (
    (
        r"(temperature|top_p|top_k|min_p|seed|thinking_token_budget|stop|presence_penalty|frequency_penalty)\b",
        r"options.\1",
    ),
    (r"repetition_penalty\b", "options.repeat_penalty"),
    (r"max_tokens\b", "options.num_predict"),
    (r"response_format(\.json_schema\.schema)?", "format"),
    (r"continue_final_message\b", "messages"),
    (r"(messages\[\d+\])\.reasoning(_content)?\b", r"\1.thinking"),
    (r"chat_template_kwargs\b", "think"),
)
_IMAGE = r"content\[(\d+)\](?:\.image_url)?"
"""Images are the first parts of a message."""
_NAMES = {
    "chat": FieldNames(((rf"(messages\[\d+\])\.{_IMAGE}", r"\1.images[\2]"), *_SHARED)),
    "generate": FieldNames(
        ((rf"messages\[\d+\]\.{_IMAGE}", r"images[\1]"), *_SHARED, (r"messages(\[\d+\](\.content)?)?", "prompt"))
    ),
    "embed": FieldNames(((r"truncate_prompt_tokens\b", "truncate"),)),
    "embeddings": FieldNames(((r"input\b", "prompt"), (r"truncate_prompt_tokens\b", "prompt"))),
}


def renamed(error: ApiError, reply_fields: OllamaFields) -> ApiError:
    """The error with the field's name in this API, also where the message quotes it."""
    return _NAMES[reply_fields.route].renamed(error)
