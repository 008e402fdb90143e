"""Replies about the server and its model."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipeline.config.settings import Settings
from pipeline.config.show import as_toml
from pipeline.runtime.messages import ExecuteFacts
from pipeline.runtime.model.generation_config import GenerationDefaults
from pipeline.runtime.model.pooler import Task
from pipeline.stages.gateway.admin.served_model import ServedModel
from pipeline.stages.gateway.errors import invalid
from pipeline.version import VERSION

CONFIG_FORMATS = ("text", "json")
HIDDEN = "hidden"
SECRET_FILES = ("api_keys_file", "ssl_certfile", "ssl_keyfile")
"""Settings of the gateway whose values are replaced: names of files that hold secrets, or may."""


Quantization = Annotated[
    str, Meta(description="Formats of the quantized weights, such as q4_1+q8_0; none if they are floats.")
]


class ModelCard(msgspec.Struct, kw_only=True):
    id: Annotated[str, Meta(description="The name that requests use.")]
    object: str = "model"
    created: Annotated[int, Meta(description="When the server started: Unix time, in seconds.")]
    owned_by: str = "pipeline"
    root: Annotated[str, Meta(description="The folder of an adapter; the name of the model itself.")]
    parent: Annotated[str | None, Meta(description="The model that an adapter changes.")] = None
    max_model_len: Annotated[int, Meta(description="Longest prompt and output together, in tokens.")]
    quantization: Quantization
    tasks: Annotated[
        list[str],
        Meta(description="generate, embed, token_embed, classify, token_classify, score: what it can be asked for."),
    ]
    input_modalities: Annotated[list[str], Meta(description="What its prompts can have: text, image.")]
    default_sampling_params: Annotated[
        dict[str, int | float],
        Meta(
            description="Defaults of a request's fields, where they differ from the API's: what the model recommends."
        ),
    ]

    @classmethod
    def of(
        cls, name: str, created: int, facts: ExecuteFacts, defaults: GenerationDefaults, tasks: Sequence[Task]
    ) -> "ModelCard":
        return cls(
            id=name,
            root=name,
            created=created,
            max_model_len=facts.max_model_len,
            quantization=facts.quantization,
            tasks=list(tasks),
            input_modalities=["text", "image"] if facts.num_encoder_rows else ["text"],
            default_sampling_params=recommended(defaults),
        )


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class ServerLoad(msgspec.Struct):
    """Load of the gateway process that replies."""

    server_load: Annotated[int, Meta(description="Requests for output whose responses are not complete.")]
    open_sequences: int
    max_open_sequences: int
    open_tokens: Annotated[int, Meta(description="Of their prompts.")]
    max_open_tokens: int
    open_bytes: Annotated[
        int, Meta(description="What these requests, and replies that clients have not read yet, keep in all processes.")
    ]
    max_open_bytes: int
    open_media_bytes: Annotated[int, Meta(description="Encoded images that these requests keep in all processes.")]
    max_open_media_bytes: int


class Version(msgspec.Struct):
    version: str


class ServerInfo(msgspec.Struct):
    vllm_config: Annotated[
        Any,
        Meta(
            description="All settings: as TOML, or with config_format=json as an object. vLLM's name for its own.",
            extra_json_schema={"type": ["string", "object"]},
        ),
    ]
    quantization: Quantization
    version: str


class AddedTokenInfo(msgspec.Struct):
    content: str
    special: Annotated[bool, Meta(description="Output texts leave it out.")]


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The tokenizer, under the names of tokenizer_config.json"""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    model_max_length: int
    add_bos_token: bool
    bos_token: str | None
    eos_token: str | None
    added_tokens_decoder: Annotated[dict[str, AddedTokenInfo], Meta(description="Added tokens by their id.")]
    chat_template: Annotated[str, Meta(description="null if the model has none.")] | None


def recommended(defaults: GenerationDefaults) -> dict[str, int | float]:
    """The values that differ from those of no defaults, by the name of the request's field."""
    no_defaults = msgspec.structs.asdict(GenerationDefaults())
    given = {name: value for name, value in msgspec.structs.asdict(defaults).items() if value != no_defaults[name]}
    return {"max_tokens" if name == "max_new_tokens" else name: value for name, value in given.items()}


def server_info(settings: Settings, config_format: str, facts: ExecuteFacts) -> ServerInfo:
    """The settings, without the names of files with secrets. Raises ApiError if the format is unknown."""
    if config_format not in CONFIG_FORMATS:
        message = f"'config_format' must be one of {', '.join(CONFIG_FORMATS)}"
        raise invalid("config_format", message, "invalid_value")
    hidden = {name: HIDDEN for name in SECRET_FILES if getattr(settings.gateway, name)}
    settings = msgspec.structs.replace(settings, gateway=msgspec.structs.replace(settings.gateway, **hidden))
    config = as_toml(settings) if config_format == "text" else msgspec.to_builtins(settings)
    return ServerInfo(config, facts.quantization, VERSION)


def tokenizer_info(model: ServedModel, max_model_len: int) -> TokenizerInfo:
    config, added = model.config, model.formats.added.values()
    texts = {token.id: token.content for token in added}
    return TokenizerInfo(
        model_max_length=max_model_len,
        add_bos_token=config.add_bos,
        bos_token=None if config.bos_id is None else texts.get(config.bos_id),
        eos_token=texts.get(config.eos_ids[0]) if config.eos_ids else None,
        added_tokens_decoder={str(token.id): AddedTokenInfo(token.content, token.special) for token in added},
        chat_template=model.formats.template or None,
    )
