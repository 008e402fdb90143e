"""Check prompts, conversations and lists of sampling parameters before anything is sent.

Errors name the prompt: `prompts[17]: …`. Only the server checks what needs the tokenizer.
"""

import array
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, Union

import msgspec
import numpy as np

from pipeline.client import protocol as p
from pipeline.client.client import ServerInfo
from pipeline.client.connection.wire import packed
from pipeline.client.inputs import images, request_options
from pipeline.client.inputs.chat import ChatOptions, chat_options, reasoning_of, tool_calls_of, unknown_keys
from pipeline.client.inputs.pooling_params import PoolingParams
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.errors import PromptError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_SHOWN_CHARS = 100
_ID_LISTS = (list, tuple, range, array.array)


class _Salted(TypedDict, total=False):
    cache_salt: str
    """Only prompts with the same salt share cached prefixes."""


class MultiModalData(TypedDict, total=False):
    image: Any
    """An image of Pillow, or a list of them."""


class _WithData(_Salted, total=False):
    multi_modal_data: MultiModalData
    """One image for each placeholder of the model in the text, such as <image>."""


class TextPrompt(_WithData):
    """A text prompt in vLLM's format."""

    prompt: str


class TokensPrompt(_Salted):
    """A prompt of token ids in vLLM's format."""

    prompt_token_ids: Sequence[int]


Prompt = Union[str, Sequence[int], "np.ndarray[Any, Any]", TextPrompt, TokensPrompt]
"""A text, or token ids."""
Message = Mapping[str, Any]
"""`{"role": "user", "content": "Hello"}`"""
Conversation = Sequence[Message]


class CheckedPrompt(NamedTuple):
    """A checked prompt in the form in which it is sent."""

    prompt: Mapping[str, Any]
    """Fields of the protocol's `Request`."""
    text: str | None
    """The text, if the prompt is one."""
    cache_salt: str | None = None
    """The prompt's own salt."""


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is one prompt (a text, a dict, or ids), not several."""
    if isinstance(prompts, (str, Mapping, range, array.array)):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1 and prompts.dtype.kind in "iu"
    return isinstance(prompts, (list, tuple)) and bool(prompts) and _is_integer(prompts[0])


def is_one_conversation(messages: Any) -> bool:
    """Whether this is one conversation (a list of messages), not several."""
    return isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], Mapping)


def prompt_of(prompt: Any, where: str, info: ServerInfo) -> CheckedPrompt:
    """Check one prompt. Raises PromptError that names `where`."""
    if isinstance(prompt, Mapping):
        key = "prompt_token_ids" if "prompt_token_ids" in prompt else "prompt"
        if unknown := sorted(map(str, set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data"})):
            raise PromptError(f"{where} has keys that are not supported: {', '.join(unknown)}")
        if key not in prompt:
            raise PromptError(f'{where} is a dict without the key "prompt" or "prompt_token_ids"')
        try:
            salt = request_options.checked(cache_salt=prompt.get("cache_salt")).cache_salt
        except (TypeError, ValueError) as error:
            raise PromptError(f"{where}: {error}") from error
        checked = prompt_of(prompt[key], f"{where}[{key!r}]", info)._replace(cache_salt=salt)
        if (data := prompt.get("multi_modal_data")) is None:
            return checked
        return _with_images(checked, data, f"{where}['multi_modal_data']", info)
    if isinstance(prompt, str):
        _check_text(prompt, where, info)
        return CheckedPrompt({"prompt": prompt}, prompt)
    if isinstance(prompt, np.ndarray) and prompt.ndim == 1:
        prompt = prompt.tolist()
    if not isinstance(prompt, _ID_LISTS):
        raise PromptError(f"{where} must be a text or a list of token ids, not {_shown(prompt)}")
    if len(prompt) == 0:
        raise PromptError(f"{where} is empty: give at least one token id")
    if len(prompt) >= info.max_model_len:
        raise PromptError(
            f"{where} has {len(prompt)} token ids; the maximum is {info.max_model_len - 1}, which leaves room for one "
            "output token"
        )
    for index, one in enumerate(prompt):
        if not _is_integer(one):
            raise PromptError(f"{where}[{index}] must be a token id, not {_shown(one)}")
        if not 0 <= one < info.vocab_size:
            known = f"0..{info.vocab_size - 1}"
            raise PromptError(f"{where}[{index}]: token id {one} is out of vocabulary, the model's ids are {known}")
    return CheckedPrompt({"prompt_token_ids": packed(prompt)}, None)


def _with_images(checked: CheckedPrompt, data: Any, where: str, info: ServerInfo) -> CheckedPrompt:
    if checked.text is None:
        raise PromptError(f"{where} needs a text as prompt, with a placeholder for each image, not token ids")
    try:
        found = images.prompt_images(data, where)
    except TypeError as error:
        raise PromptError(str(error)) from error
    _check_num_bytes(sum(len(image.url) for image in found), where, info)
    return checked._replace(prompt={**checked.prompt, "images": found}) if found else checked


def _check_num_bytes(num_bytes: int, where: str, info: ServerInfo) -> None:
    """Of images."""
    if num_bytes > info.max_message_bytes:
        raise PromptError(
            f"{where} has {num_bytes} bytes as a data: URL; this server accepts at most "
            f"{info.max_message_bytes} (gateway.max_body_bytes)"
        )


def info_for(params: SamplingParams | PoolingParams, info: ServerInfo) -> ServerInfo:
    """The limits for a prompt with these parameters: no maximum length if the server truncates the prompt. Models that
    don't generate text take one more token, because none follows."""
    if isinstance(params, PoolingParams) and info.tasks and "generate" not in info.tasks:
        info = msgspec.structs.replace(info, max_model_len=info.max_model_len + 1)
    return msgspec.structs.replace(info, max_model_len=sys.maxsize) if params.truncate_prompt_tokens else info


def chat_options_of(
    add_generation_prompt: Any, continue_final_message: Any, tools: Any, chat_template_kwargs: Any
) -> ChatOptions:
    """Check and convert the options of a call's conversations. Raises PromptError."""
    try:
        return chat_options(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
    except (TypeError, ValueError) as error:
        raise PromptError(str(error)) from error


def chat_of(messages: Any, where: str, options: ChatOptions, info: ServerInfo) -> CheckedPrompt:
    """Check one conversation. Raises PromptError that names `where`."""
    return CheckedPrompt(options.prompt(_checked_conversation(messages, where, info)), None)


def _checked_conversation(messages: Any, where: str, info: ServerInfo) -> list[p.MessageParam]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError(f"{where} must be a list of messages, not {_shown(messages)}")
    if not messages:
        raise PromptError(f"{where} is empty: give at least one message")
    return [_checked_message(message, f"{where}[{index}]", info) for index, message in enumerate(messages)]


def _checked_message(message: Any, where: str, info: ServerInfo) -> p.MessageParam:
    if not isinstance(message, Mapping):
        raise PromptError(f'{where} must be a dict such as {{"role": "user", "content": "…"}}, not {_shown(message)}')
    if unknown := unknown_keys(message):
        raise PromptError(f"{where} has keys that are not supported: {', '.join(unknown)}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise PromptError(f"{where}['role'] must be one of {', '.join(ROLES)}, not {_shown(role)}")
    try:
        calls = tool_calls_of(message.get("tool_calls"), f"{where}['tool_calls']")
    except (TypeError, ValueError) as error:
        raise PromptError(str(error)) from error
    if isinstance(content, (list, tuple)):
        content = [_part(part, f"{where}['content'][{index}]", info) for index, part in enumerate(content)]
    elif not isinstance(content, str) and (content is not None or role != "assistant"):
        raise PromptError(f"{where}['content'] must be a text, not {_shown(content)}")
    name, call_id, reasoning = message.get("name"), message.get("tool_call_id"), reasoning_of(message)
    for key, other in (("name", name), ("tool_call_id", call_id), ("reasoning", reasoning)):
        if other is not None and not isinstance(other, str):
            raise PromptError(f"{where}['{key}'] must be a text, not {_shown(other)}")
    texts = [part.text or "" for part in content] if isinstance(content, list) else [content or ""]
    _check_text("\n".join([*texts, reasoning or ""]), f"{where}['content']", info)
    return p.MessageParam(role, content, name, calls or None, call_id, reasoning)


def _part(part: Any, where: str, info: ServerInfo) -> p.ContentPart:
    """One content part of a message, in OpenAI's format."""
    match part:
        case {"type": "text", "text": str(text)}:
            return p.ContentPart("text", text)
        case {"type": str(kind)} if kind in images.PARTS:
            try:
                found = images.image_part(part, where)
            except TypeError as error:
                raise PromptError(str(error)) from error
            _check_num_bytes(images.num_bytes(found), where, info)
            return found
        case {"type": str(kind)} if kind != "text":
            raise PromptError(f"{where}: content of type {kind!r} is not supported, only text and images")
    raise PromptError(f'{where} must be a dict such as {{"type": "text", "text": "…"}}, not {_shown(part)}')


def _check_text(text: str, where: str, info: ServerInfo) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise PromptError(f"{where} contains a lone surrogate, which is not a valid character") from None
    if num_bytes > info.max_message_bytes:
        raise PromptError(f"{where} has {num_bytes} bytes; this server accepts at most {info.max_message_bytes}")


def params_for(params: Any, num_prompts: int | None, default: SamplingParams) -> Iterator[SamplingParams]:
    """The parameters of each prompt: one for all, or one for each. `num_prompts` is None for an iterator.

    Raises PromptError; for a list of the wrong length at once.
    """
    if params is None or isinstance(params, SamplingParams):
        return _same(params or default)
    if isinstance(params, (str, Mapping)) or not isinstance(params, Iterable):
        raise PromptError(f"sampling_params must be SamplingParams or a list of them, not {_shown(params)}")
    if isinstance(params, Sequence):
        if num_prompts is not None and len(params) != num_prompts:
            raise PromptError(
                f"sampling_params has {len(params)} entries for {num_prompts} prompts: give one, or one for each"
            )
        for index, one in enumerate(params):
            _check_params(one, index, default)
    return _each(params, default)


def _same(params: SamplingParams) -> Iterator[SamplingParams]:
    while True:
        yield params


def _each(params: Iterable[Any], default: SamplingParams) -> Iterator[SamplingParams]:
    num = 0
    for index, one in enumerate(params):
        yield _check_params(one, index, default)
        num = index + 1
    raise PromptError(f"sampling_params has {num} entries, but there are more prompts: give one, or one for each")


def _check_params(one: Any, index: int, default: SamplingParams) -> SamplingParams:
    if one is None:
        return default
    if not isinstance(one, SamplingParams):
        raise PromptError(f"sampling_params[{index}] must be SamplingParams, not {_shown(one)}")
    return one


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    words = reprlib.repr(value)  # the value may be of any size
    return words if len(words) <= MAX_SHOWN_CHARS else words[: MAX_SHOWN_CHARS - 1] + "…"
