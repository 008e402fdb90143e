"""Settings that apply to single requests: limits, and the formats of chat replies."""

from typing import Annotated, Literal

from msgspec import Meta

from pipeline.config.sections.base import MAX_BYTES, Frozen, Seconds

MAX_LOGPROBS = 1024
"""The largest `limits.max_logprobs`."""


MAX_IMAGES = 1000
"""The largest `limits.max_images`."""


MAX_BUDGET_MESSAGE_CHARS = 1024
"""The longest `chat.reasoning_budget_message`, and that of a request."""


class LimitSettings(Frozen, frozen=True):
    """Limits of one request; a request beyond them gets 400."""

    max_n: Annotated[int, Meta(ge=1, le=65536, description="Maximum of n, the sequences of a prompt.")] = 128
    max_best_of: Annotated[
        int, Meta(ge=1, le=65536, description="Maximum of best_of, the sequences that a prompt generates.")
    ] = 128
    max_logprobs: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_LOGPROBS,
            description="Maximum of top_logprobs, logprobs and prompt_logprobs: the likeliest tokens in a reply.",
        ),
    ] = 20
    max_stop_strings: Annotated[int, Meta(ge=1, le=4096, description="Maximum number of stop strings.")] = 16
    max_stop_token_ids: Annotated[int, Meta(ge=1, le=4096, description="Maximum number of stop token ids.")] = 128
    max_logit_bias: Annotated[int, Meta(ge=1, le=65536, description="Maximum number of entries in logit_bias.")] = 1024
    max_bad_words: Annotated[int, Meta(ge=1, le=65536, description="Maximum number of entries in bad_words.")] = 1024
    max_tools: Annotated[int, Meta(ge=1, le=4096, description="Maximum number of tools in a chat.")] = 128
    max_images: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_IMAGES,
            description="Maximum number of images in a request. 0: images are refused, and the model's vision tower is "
            "not loaded.",
        ),
    ] = 100
    max_prompt_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=MAX_BYTES,
            description="Maximum size of a prompt's text, or of all messages of a chat, in bytes.",
        ),
    ] = 4 * 1024**2
    max_grammar_bytes: Annotated[
        int,
        Meta(
            ge=1024, le=MAX_BYTES, description="Maximum size of a schema, pattern or grammar for the output, in bytes."
        ),
    ] = 128 * 1024
    max_json_depth: Annotated[
        int,
        Meta(ge=8, le=512, description="Maximum nesting of arrays and objects in a body; schemas have a lower limit."),
    ] = 128
    max_header_bytes: Annotated[
        int, Meta(ge=1024, le=1024**2, description="Maximum size of an HTTP header, and of a request target, in bytes.")
    ] = 8190
    template_timeout_s: Annotated[Seconds, Meta(description="Maximum time for the chat template.")] = 2.0
    grammar_timeout_s: Annotated[Seconds, Meta(description="Maximum time for checking a grammar.")] = 1.0
    max_prompt_logprobs: Annotated[
        int,
        Meta(
            ge=1,
            le=2**31 - 1,
            description="Maximum number of prompt log probabilities in one reply, those of the likeliest tokens "
            "included. A prompt's count for each choice that returns them.",
        ),
    ] = 2**20


_ToolFormats = Literal[
    "hermes", "llama3", "mistral", "generic", "deepseek_v3", "deepseek_v31", "functiongemma", "gemma4"
]
_MoreToolFormats = Literal["glm4", "glm45", "granite", "kimi_k2", "lfm2", "olmo3", "openai", "phi4_mini_json"]
_XmlToolFormats = Literal["apertus", "muse_glimmer", "pythonic", "qwen3_coder", "seed_oss"]
"""The names of `ToolFormat`s, by the line; the others are their `aliases`."""
_OtherNames = Literal["glm47", "gpt_oss", "granite4", "harmony", "llama3_json", "llama4_json", "llama4_pythonic"]
_QwenNames = Literal["qwen3_json", "qwen3_xml"]
ToolCallParser = Literal["auto", "none", _ToolFormats, _MoreToolFormats, _XmlToolFormats, _OtherNames, _QwenNames]

_ReasoningFormats = Literal["deepseek_r1", "deepseek_v3", "gemma4", "glm45", "granite", "kimi_k2", "mistral", "qwen3"]
_MoreReasoningFormats = Literal["apertus", "ernie45", "muse_glimmer", "openai_gptoss", "seed_oss"]
_OtherReasoningNames = Literal["deepseek_v31", "glm47", "gpt_oss", "openai"]
ReasoningParser = Literal["auto", "none", _ReasoningFormats, _MoreReasoningFormats, _OtherReasoningNames]


class ChatSettings(Frozen, frozen=True):
    """How the model writes tool calls and reasoning."""

    tool_call_parser: Annotated[
        ToolCallParser,
        Meta(
            description='How the model writes tool calls. "auto" detects it from the chat template: '
            'docs/http/tools.md has a table of the families. Other names, such as "llama3_json", are vLLM\'s. '
            '"generic" is for chat templates without tools: the system prompt lists the tools. "none" parses no calls.'
        ),
    ] = "auto"
    allow_special_tokens_in_content: Annotated[
        bool,
        Meta(
            description="Encode special tokens, such as <|im_end|>, in the messages and tools of a chat as such, as "
            "vLLM does: a message can then end its turn and pose as another. If this is off, they are plain text."
        ),
    ] = False
    reasoning_parser: Annotated[
        ReasoningParser,
        Meta(
            description='How the model writes its reasoning. "auto" detects it from the chat template: '
            'docs/http/tools.md has a table of the families. "deepseek_r1" and "qwen3" differ only if the prompt has '
            'no tag: then a reply begins inside the reasoning ("deepseek_r1") or before it. "none" leaves reasoning '
            "in the content."
        ),
    ] = "auto"
    reasoning_budget: Annotated[
        int,
        Meta(
            ge=-1,
            lt=2**31,
            description="The most tokens of reasoning in a reply to a chat; then it is ended, and the answer follows. "
            "0 ends it at once, -1 sets no limit. Requests may ask for another limit with thinking_token_budget.",
        ),
    ] = -1
    reasoning_budget_message: Annotated[
        str,
        Meta(
            max_length=MAX_BUDGET_MESSAGE_CHARS,
            description="A text that reasoning ends with if its budget is used, before the mark that ends it: it tells "
            "the model why, as a sentence of its own reasoning.",
        ),
    ] = ""
