"""Converts a chat to the variables of a template: plain dicts and lists, as in transformers' `apply_chat_template` and
vLLM. Pure.

    role, content, name                       as they are
    tool_calls        [{id, type, function: {name, arguments}}], with arguments as an object, {} if the text is not
                      one; or as text for templates that expect it
    tool_call_id      of a tool's message
    reasoning         as `reasoning`, `reasoning_content` and `thinking`; for some templates, as a part of the content
"""

import re
from typing import Any

import msgspec

from pipeline.config.closest import closest
from pipeline.media.limits import IMAGE_ROLES
from pipeline.runtime.messages import ChatMessage, ChatPrompt, ToolCall
from pipeline.stages.ingest.templates.template_inspection import TemplateTraits

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Written after the message that the output continues, to find its end in the rendered text. The trailing space shows
whether the template strips its messages."""

OWN_FIELDS = {
    "add_generation_prompt": "it is a field of the request itself",
    "chat_template": "the model's own template is used",
    "continue_final_message": "it is a field of the request itself",
    "documents": "it is a field of the request itself",
    "messages": "it is a field of the request itself",
    "tokenize": "the prompt is always tokenized",
    "tools": "it is a field of the request itself",
}
"""Names that `chat_template_kwargs` can't set, and why."""


API_ROLES = ("system", "developer", "user", "assistant", "tool")

IMAGE_PART = {"type": "image"}
"""What templates get for an image; they write its placeholder."""

ROLE_MARK = "ROLE_MARK_{}_END"
"""Stands for the content of a message of another role, to see whether the template writes it."""
ROLE_MARKS = re.compile(r"ROLE_MARK_[0-9]+_END")

MAX_OTHER_ROLES = 32
"""Of the roles that are none of the API's, only so many are compared with those: it takes a while."""


class BadChat(Exception):
    """The chat can't be given to a template; the message is for the client."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def variables(prompt: ChatPrompt, traits: TemplateTraits) -> dict[str, Any]:
    """The template's variables. Raises BadChat."""
    kwargs = object_of(prompt.template_kwargs)
    for name in kwargs:
        if name in OWN_FIELDS:
            raise BadChat(f"'chat_template_kwargs' can't have {name!r}: {OWN_FIELDS[name]}", "chat_template_kwargs")
    messages = [_message(message, traits) for message in prompt.messages]
    has_developer = any(message.role == "developer" for message in prompt.messages)
    if traits.one_system or (has_developer and not traits.developer):
        messages = _with_one_system(messages)
    if prompt.continue_final_message:
        if prompt.add_generation_prompt:
            raise BadChat(
                "'continue_final_message' and 'add_generation_prompt' can't both be true: the output continues the "
                "last message or starts a new one",
                "continue_final_message",
            )
        _tag(messages[-1])
    return {
        **kwargs,
        "messages": messages,
        "tools": _tools(prompt),
        "documents": array_of(prompt.documents, "documents"),
        "add_generation_prompt": prompt.add_generation_prompt,
    }


def with_marks(prompt: ChatPrompt) -> ChatPrompt | None:
    """The chat with a mark as the content of each message whose role is not one of the API's; None if there is none.
    Rendered, it shows whether the template takes these roles: many write only the messages of roles that they know."""
    if all(message.role in API_ROLES for message in prompt.messages):
        return None
    messages = [
        message
        if message.role in API_ROLES
        else msgspec.structs.replace(message, content=ROLE_MARK.format(index), parts=None)
        for index, message in enumerate(prompt.messages)
    ]
    return msgspec.structs.replace(prompt, messages=messages)


def check_marks(text: str, prompt: ChatPrompt) -> None:
    """Check the rendered text of `with_marks`. Raises BadChat if the template has omitted a message."""
    written = set(ROLE_MARKS.findall(text))
    for index, message in enumerate(prompt.messages):
        if message.role not in API_ROLES and ROLE_MARK.format(index) not in written:
            raise BadChat(
                f"'messages[{index}].role': the model's chat template ignores messages of the role {message.role!r}",
                f"messages[{index}].role",
            )


def check_roles(prompt: ChatPrompt, template: str) -> None:
    """Raises BadChat if a message's role is a misspelled one of the API's: most templates write any role. `template` is
    the template's source, which may mention the role."""
    first_indices = {message.role: index for index, message in reversed(list(enumerate(prompt.messages)))}
    others = sorted((index, role) for role, index in first_indices.items() if role not in API_ROLES)
    for index, role in others[:MAX_OTHER_ROLES]:
        if role not in template and (advice := closest(role, API_ROLES)):
            raise BadChat(
                f"'messages[{index}].role' must be {', '.join(API_ROLES[:-1])} or {API_ROLES[-1]}, or a role that the "
                f"chat template mentions, not {role!r}{advice}",
                f"messages[{index}].role",
            )


def has_tools(prompt: ChatPrompt) -> bool:
    """Whether the template gets the tools. It does not if none may be called."""
    return bool(prompt.tools) and prompt.tool_choice != "none"


def up_to_tag(text: str, prompt: ChatPrompt) -> str:
    """Cut the text after the last message's content. Raises BadChat if the template has omitted it.

    As in transformers: a template that strips messages strips the tag's space too, and then the space before the tag is
    not the message's. Before a message without text, it is the template's own."""
    message = prompt.messages[-1]
    said = (message.parts[-1] if message.parts else message.content) or ""
    index = text.rfind(CONTINUE_TAG.strip())
    if index < 0 or said.strip() not in text:
        raise BadChat(
            "the model's chat template changes the last message, so the output can't continue it",
            "continue_final_message",
        )
    keeps_space = text.startswith(CONTINUE_TAG, index) or not said.strip()
    return text[:index] if keeps_space else text[:index].rstrip()


def length(text: str) -> int:
    """Of a text as UTF-8, in bytes. What a text costs a tokenizer grows with these: a character of another alphabet
    may become several tokens, and one such as U+FDFA is 18 letters for a model that normalizes it."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def num_bytes(prompt: ChatPrompt) -> int:
    """About how long the rendered chat is."""
    size = len(prompt.tools) + len(prompt.documents) + len(prompt.template_kwargs)
    return size + sum(map(_message_bytes, prompt.messages))


MESSAGE_BYTES = 40
"""About what a template adds to a message."""


def _message_bytes(message: ChatMessage) -> int:
    """Of everything that a client may make long: templates write names and ids too, and all of it is searched."""
    size = MESSAGE_BYTES + length(message.content or "") + length(message.reasoning or "")
    size += length(message.role) + length(message.name or "") + length(message.tool_call_id or "")
    if message.parts is not None:
        size += MESSAGE_BYTES * len(message.parts)
    for call in message.tool_calls:
        size += MESSAGE_BYTES + length(call.id) + length(call.name) + length(call.arguments)
    return size


def _message(message: ChatMessage, traits: TemplateTraits) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    if message.reasoning is not None:
        plain["thinking"] = message.reasoning
    plain["role"] = message.role
    plain["content"] = _content(message, traits)
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call, traits) for call in message.tool_calls]
    if message.reasoning is not None:
        plain["reasoning"] = plain["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _content(message: ChatMessage, traits: TemplateTraits) -> Any:
    """Text for most templates. Parts for a template that loops over them, unless it takes text too and the message is
    text, a tool's or the assistant's: some loop over the parts of users only, and write others as they are. A missing
    content is None for templates that test for it, and empty otherwise. Raises BadChat for images that a template would
    not show."""
    if message.image_offsets:
        return _with_images(message, traits)
    if traits.empty_parts and message.role == "assistant" and not message.content and not message.tool_calls:
        return [{"type": "text", "text": ""}]
    if traits.thinking_parts and message.role == "assistant" and message.reasoning:
        texts = [message.content or ""] if message.parts is None else message.parts
        parts = [{"type": "text", "text": text} for text in texts]
        return [{"type": "thinking", "thinking": message.reasoning}, *parts]
    if message.content is None:
        if traits.none:
            return None
        return [] if traits.parts and not traits.text_too else ""
    if traits.parts and (
        not traits.text_too or (message.parts is not None and message.role not in ("tool", "assistant"))
    ):
        texts = [message.content] if message.parts is None else message.parts
        return [{"type": "text", "text": text} for text in texts]
    return message.content


def _with_images(message: ChatMessage, traits: TemplateTraits) -> list[dict[str, Any]]:
    if not traits.parts:
        raise BadChat("the model's chat template takes texts only, so a chat can't have images", "messages")
    if message.role not in IMAGE_ROLES:
        raise BadChat(f"a message of the role {message.role!r} can't have images", "messages")
    texts, content = message.parts or [], []
    for index in range(len(texts) + 1):
        content += [dict(IMAGE_PART) for offset in message.image_offsets if offset == index]
        content += [{"type": "text", "text": text} for text in texts[index : index + 1]]
    return content


def _tool_call(call: ToolCall, traits: TemplateTraits) -> dict[str, Any]:
    arguments: Any = call.arguments
    if not traits.json_arguments:
        arguments = arguments_of(call)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call; empty if the text is no object. max_tokens may have cut a call; a chat with such a call
    is still valid."""
    try:
        arguments = _decoded(call.arguments)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join developer and system messages into one system message at the start, for templates that don't know the
    developer role, or that take a system message there alone."""
    texts = []
    others = []
    for message in messages:
        if message["role"] not in ("developer", "system"):
            others.append(message)
            continue
        content = message["content"]
        text = "\n".join(part["text"] for part in content) if isinstance(content, list) else content
        if text:
            texts.append((text, content))
    as_parts = any(isinstance(content, list) for _, content in texts)
    whole: Any = "\n\n".join(text for text, _ in texts)
    return [{"role": "system", "content": [{"type": "text", "text": whole}] if as_parts else whole}, *others]


def _tag(message: dict[str, Any]) -> None:
    content = message["content"]
    if isinstance(content, list) and content:
        if content[-1] == IMAGE_PART:
            raise BadChat("the last message ends with an image, which the output can't continue", "messages")
        content[-1]["text"] += CONTINUE_TAG
    elif isinstance(content, str) and (content or not message.get("tool_calls")):
        message["content"] = content + CONTINUE_TAG
    else:
        raise BadChat("the last message has no content to continue", "continue_final_message")


def _tools(prompt: ChatPrompt) -> list[Any] | None:
    return array_of(prompt.tools, "tools") if has_tools(prompt) else None


def array_of(text: str, param: str) -> list[Any] | None:
    """The client's array of objects; None if it gave none. Raises BadChat."""
    if not text:
        return None
    try:
        value = _decoded(text)
    except ValueError as error:
        raise BadChat(f"'{param}' is not valid JSON: {error}", param) from error
    if not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise BadChat(f"'{param}' must be an array of objects", param)
    return value


def object_of(text: str) -> dict[str, Any]:
    """The client's variables for the template. Raises BadChat."""
    if not text:
        return {}
    try:
        value = _decoded(text)
    except ValueError as error:
        raise BadChat(f"'chat_template_kwargs' is not valid JSON: {error}", "chat_template_kwargs") from error
    if not isinstance(value, dict):
        raise BadChat("'chat_template_kwargs' must be an object", "chat_template_kwargs")
    return value


def _decoded(text: str) -> Any:
    """Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
