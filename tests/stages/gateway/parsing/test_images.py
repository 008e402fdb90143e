"""Images of chats: base64 of data: URLs becomes the bytes that ingest gets, and everything else is refused by name."""

import base64
import json
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import LimitSettings as Caps
from pipeline.media.limits import LIMITS
from pipeline.runtime import messages as m
from pipeline.stages.gateway.admission.open_bytes import images_bytes, measure
from pipeline.stages.gateway.apis.anthropic.parsing import parse_count_tokens, parse_messages
from pipeline.stages.gateway.apis.ollama import parsing as ollama
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_tokenize
from pipeline.stages.gateway.apis.responses.items import CallOutputItem
from pipeline.stages.gateway.apis.responses.parsing import ParsedResponse, Referred, parse_response
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.chat.images import PIECE_CHARS, ChatImages
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.text.formats.chat_formats import ChatFormats
from tests.zmq_requests import chat as zmq_chat
from tests.zmq_requests import generate, parsed

LIMITS_ON = RequestLimits(model="tiny", max_sequences=64, max_prompt_tokens=1000, why_no_images="")
AT = "messages[0].content[0].image_url.url"


def url(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


def image(data: bytes = b"abc", **fields: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": url(data), **fields}}


def text(value: str) -> Any:
    return {"type": "text", "text": value}


def body(*parts: Any, role: str = "user", **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": list(parts), **fields}]}).encode()


def error_of(sent: bytes, limits: RequestLimits = LIMITS_ON) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse_chat(sent, limits)
    assert error.value.status == 400
    return error.value


def message_of(request: ParsedRequest, index: int = 0) -> m.ChatMessage:
    (prompt,) = request.prompts
    assert isinstance(prompt, m.ChatPrompt)
    return prompt.messages[index]


def test_images_keep_their_place_among_the_texts() -> None:
    sent = body(image(b"1"), text("a"), text("b"), image(b"2", detail="high"), image(b"3", detail="auto"))
    request = parse_chat(sent, LIMITS_ON)
    message = message_of(request)
    assert (message.content, message.parts, message.image_offsets) == ("a\nb", ["a", "b"], [0, 2, 2])
    paths = [f"messages[0].content[{index}].image_url.url" for index in (0, 3, 4)]
    details = ("", "high", "")
    expected = [m.EncodedImage(*one) for one in zip((b"1", b"2", b"3"), paths, details, strict=True)]
    assert request.images == expected
    assert parse_tokenize(sent, LIMITS_ON).images == expected


def test_the_url_may_be_a_string_and_its_media_type_is_ignored() -> None:
    for head in ("data:image/png;base64,", "data:;base64,", "DATA:text/plain;charset=x;BASE64,"):
        request = parse_chat(body({"type": "image_url", "image_url": url(b"\xff\xfe", head)}), LIMITS_ON)
        (found,) = request.images
        assert (found.data, found.param) == (b"\xff\xfe", "messages[0].content[0].image_url")
        assert (message_of(request).content, message_of(request).parts) == ("", [])


def test_results_of_tools_may_have_images_and_the_zeromq_protocol_too() -> None:
    request = parse_chat(body(text("a"), image(), role="tool", tool_call_id="c"), LIMITS_ON)
    assert message_of(request).image_offsets == [1] and len(request.images) == 1
    messages = json.loads(body(image()))["messages"]
    request = parsed(generate(1, zmq_chat(messages)), LIMITS_ON)
    assert message_of(request).image_offsets == [0] and request.images[0].data == b"abc"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("https://a.b/c.png", "is an https: URL, and this server fetches none: send a data: URL"),
        ("HTTP://a", "is an http: URL"),
        ("file:///etc/passwd", "must be a data: URL with base64"),
        ("data:image/png,abc", "must be a data: URL with base64"),
        ("data:" + "x" * 300 + ";base64,YWJj", "must be a data: URL with base64"),
        ("", "must be a data: URL with base64"),
        ("data:image/png;base64,", "must be base64"),
        ("data:image/png;base64,YWJ", "must be base64"),
        ("data:image/png;base64,YWJj=", "must be base64"),
        ("data:image/png;base64,YW Jj", "must be base64"),
        ("data:image/png;base64,YW-_", "must be base64"),
        ("data:image/png;base64,YWé_", "must be base64"),
        ("data:image/png;base64," + "A" * (PIECE_CHARS - 2) + "==" + "AAAA", "must be base64"),
    ],
)
def test_what_is_no_data_url_with_base64_is_refused(value: str, words: str) -> None:
    error = error_of(body({"type": "image_url", "image_url": {"url": value}}))
    assert error.param == AT and words in error.message and len(error.message) < 250


@pytest.mark.parametrize("num", [1, 2, 3, 3 * PIECE_CHARS // 4, 3 * PIECE_CHARS // 4 + 1, 2 * PIECE_CHARS])
def test_base64_of_any_length_is_decoded(num: int) -> None:
    data = bytes(range(256)) * (num // 256) + bytes(num % 256)
    images = ChatImages("")
    images.add_url("a", url(data))
    images.add_base64("b", base64.b64encode(data).decode())
    assert [one.data for one in images.found] == [data, data]


def test_an_image_that_is_too_large_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ApiError, match=f"the limit is {LIMITS.max_bytes}"):
        ChatImages("").add_base64("a", "*" * (LIMITS.max_bytes // 3 * 4 + 64))


@pytest.mark.parametrize(
    ("parts", "fields", "param", "words"),
    [
        ([{"type": "image_url"}], {}, "messages[0].content[0].image_url", "is required"),
        ([image(detail="max")], {}, "messages[0].content[0].image_url.detail", "one of auto, low, high"),
        ([image()], {"role": "system"}, "messages[0].content[0]", "messages of role user or tool"),
        ([image()], {"role": "assistant"}, "messages[0].content[0]", "messages of role user or tool"),
    ],
)
def test_bad_parts_are_named(parts: list[Any], fields: dict[str, Any], param: str, words: str) -> None:
    error = error_of(body(*parts, **fields))
    assert error.param == param and words in error.message


@pytest.mark.parametrize("most", [1, 3])
def test_max_images_bounds_a_request(most: int) -> None:
    limits = msgspec.structs.replace(LIMITS_ON, caps=Caps(max_images=most))
    assert len(parse_chat(body(*[image()] * most), limits).images) == most
    error = error_of(body(*[image()] * (most + 1)), limits)
    assert error.param == f"messages[0].content[{most}]" and error.code == "invalid_value"
    assert f"one image too many: a request can have {most} (limits.max_images)" in error.message


def test_the_error_of_a_server_that_takes_no_images_says_why() -> None:
    error = error_of(body(image()), RequestLimits(model="tiny", max_sequences=1, why_no_images="it is late"))
    assert (error.param, error.code) == ("messages[0].content[0]", "unsupported")
    assert error.message == "'messages[0].content[0]' is an image, and it is late"


def blocks(*content: Any, role: str = "user") -> bytes:
    return json.dumps({"model": "tiny", "max_tokens": 1, "messages": [{"role": role, "content": content}]}).encode()


def block(encoded: bytes = b"abc", **source: Any) -> Any:
    given = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(encoded).decode()}
    return {"type": "image", "source": given | source}


def test_blocks_of_the_messages_api_keep_their_place() -> None:
    found = {"type": "tool_result", "tool_use_id": "c", "content": [text("r"), block(b"1")]}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    sent = {
        "model": "tiny",
        "max_tokens": 1,
        "messages": [
            {"role": "user", "content": [block(b"0"), text("a")]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [found, text("b"), block(b"2"), text("c")]},
        ],
    }
    for parse in (parse_messages, parse_count_tokens):
        request = parse(json.dumps(sent).encode(), LIMITS_ON)
        (prompt,) = request.prompts
        assert isinstance(prompt, m.ChatPrompt)
        shown = [(one.role, one.parts, one.image_offsets) for one in prompt.messages if one.role != "assistant"]
        assert shown == [("user", ["a"], [0]), ("tool", ["r"], [1]), ("user", ["b", "c"], [1])]
        assert [one.data for one in request.images] == [b"0", b"1", b"2"]
        assert request.images[1].param == "messages[2].content[0].content[1].source.data"


@pytest.mark.parametrize(
    ("sent", "param", "words"),
    [
        (blocks({"type": "image"}), "messages[0].content[0].source", "is required"),
        (blocks(block(type="url", url="http://a")), "messages[0].content[0].source.type", "it must be base64"),
        (blocks(block(data=None)), "messages[0].content[0].source.data", "is required"),
        (blocks(block(data="!")), "messages[0].content[0].source.data", "must be base64"),
        (blocks(block(), role="assistant"), "messages[0].content[0]", "messages of role user or tool"),
    ],
)
def test_bad_blocks_of_the_messages_api_are_named(sent: bytes, param: str, words: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_messages(sent, LIMITS_ON)
    assert (error.value.status, error.value.param) == (400, param) and words in error.value.message


def ollama_chat(image: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "images": ["MQ==", image]} | fields]
    return json.dumps({"model": "tiny", "messages": messages}).encode()


def ollama_generate(image: str, **fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "b", "images": ["MQ==", image]} | fields).encode()


def test_images_of_ollamas_api_stand_before_the_text() -> None:
    limits = msgspec.structs.replace(LIMITS_ON, formats=ChatFormats(template="x"))
    for request in (
        ollama.parse_chat(ollama_chat("Mg=="), limits),
        ollama.parse_generate(ollama_generate("Mg==", system="s"), limits),
    ):
        (prompt,) = request.prompts
        assert isinstance(prompt, m.ChatPrompt)
        assert (prompt.messages[1].parts, prompt.messages[1].image_offsets) == (["b"], [0, 0])
        assert [one.data for one in request.images] == [b"1", b"2"]


@pytest.mark.parametrize(
    ("parse", "sent", "param", "words"),
    [
        (
            ollama.parse_chat,
            ollama_chat("!"),
            "messages[1].images[1]",
            "the image 'messages[1].images[1]' must be base64",
        ),
        (ollama.parse_chat, ollama_chat("Mg==", role="assistant"), "messages[1].images[0]", "role user or tool"),
        (ollama.parse_generate, ollama_generate("!", system="s"), "images[1]", "the image 'images[1]' must be base64"),
        (ollama.parse_generate, ollama_generate("Mg==", raw=True), "images", "they need a chat template"),
    ],
)
def test_bad_images_of_ollamas_api_are_named(parse: Any, sent: bytes, param: str, words: str) -> None:
    limits = msgspec.structs.replace(LIMITS_ON, formats=ChatFormats(template="x"))
    with pytest.raises(ApiError) as error:
        parse(sent, limits)
    assert (error.value.status, error.value.param) == (400, param) and words in error.value.message


def responses(*items: Any, limits: RequestLimits = LIMITS_ON, **referred: Any) -> ParsedResponse:
    sent = json.dumps({"input": list(items), **({"previous_response_id": "r"} if referred else {})}).encode()
    return parse_response(sent, limits, Referred(is_on=True, **referred), "seed")


def input_image(data: bytes = b"abc", **fields: Any) -> Any:
    return {"type": "input_image", "image_url": url(data)} | fields


def test_images_of_responses_stay_in_the_conversation() -> None:
    said = {"role": "user", "content": [input_image(b"1"), {"type": "input_text", "text": "a"}, input_image(b"2")]}
    first = responses(said)
    message = message_of(first.request)
    assert (message.content, message.parts, message.image_offsets) == ("a", ["a"], [0, 1])
    assert [one.data for one in first.request.images] == [b"1", b"2"]
    assert first.request.images[1].param == "input[0].content[2].image_url"
    large = responses({"role": "user", "content": [input_image(bytes(3000))]})
    assert large.items[0].num_bytes > 4000
    second = responses({"role": "user", "content": [input_image(b"3")]}, before=first.items)
    assert [one.data for one in second.request.images] == [b"1", b"2", b"3"]
    assert second.request.images[0].param == "previous_response_id"
    (prompt,) = second.request.prompts
    assert isinstance(prompt, m.ChatPrompt)
    assert [one.image_offsets for one in prompt.messages] == [[0, 1], [0]]


FUNCTION_CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


def output(*parts: Any) -> Any:
    return {"type": "function_call_output", "call_id": "c1", "output": list(parts)}


@pytest.mark.parametrize("kind", ["function_call", "custom_tool_call"])
def test_images_of_a_tool_s_output_stay_in_the_conversation(kind: str) -> None:
    call = {**FUNCTION_CALL, "type": kind, "input": "{}"}
    parts = [{"type": "input_text", "text": "a"}, input_image(b"1"), {"type": "input_text", "text": "b"}]
    first = responses(call, {"type": f"{kind}_output", "call_id": "c1", "output": [*parts, input_image(b"2")]})
    message = message_of(first.request, index=-1)
    assert (message.role, message.tool_call_id) == ("tool", "c1")
    assert (message.content, message.parts, message.image_offsets) == ("a\nb", ["a", "b"], [1, 2])
    assert [one.data for one in first.request.images] == [b"1", b"2"]
    assert first.request.images[1].param == "input[1].output[3].image_url"
    assert first.items[1].num_parts == 4 and first.items[0].num_parts == 1
    large = responses(call, {"type": f"{kind}_output", "call_id": "c1", "output": [input_image(bytes(3000))]})
    assert large.items[1].num_bytes > 4000
    second = responses({"role": "user", "content": "x"}, before=first.items)
    assert [one.param for one in second.request.images] == ["previous_response_id"] * 2
    texts = responses(call, {"type": f"{kind}_output", "call_id": "c1", "output": [parts[0], parts[2]]})
    assert isinstance(item := texts.items[1].item, CallOutputItem) and item.output == "a\nb"
    assert message_of(texts.request, index=-1).content == "a\nb"


@pytest.mark.parametrize(
    ("item", "param", "words"),
    [
        (
            {"role": "user", "content": [input_image(image_url=None)]},
            "input[0].content[0].image_url",
            "stores no files",
        ),
        (
            {"role": "user", "content": [input_image(image_url="http://a")]},
            "input[0].content[0].image_url",
            "fetches none",
        ),
        ({"role": "user", "content": [input_image(detail="x")]}, "input[0].content[0].detail", "auto, low, high"),
        ({"role": "system", "content": [input_image()]}, "input[0].content[0]", "messages of role user or tool"),
        (output(input_image(image_url=None)), "input[1].output[0].image_url", "stores no files"),
        (output(input_image(image_url="data:,a")), "input[1].output[0].image_url", "must be a data: URL with base64"),
    ],
)
def test_bad_images_of_responses_are_named(item: Any, param: str, words: str) -> None:
    with pytest.raises(ApiError) as error:
        responses(*([FUNCTION_CALL] if "output" in item else []), item)
    assert (error.value.status, error.value.param) == (400, param) and words in error.value.message


def test_images_count_apart_from_the_bytes_of_texts() -> None:
    without, data = parse_chat(body(text("a")), LIMITS_ON), bytes(100_000)
    request = parse_chat(body(text("a"), image(data), image(data)), LIMITS_ON)
    sizes = [measure(one) for one in (without, request)]
    assert sizes[1].prompts[0] - sizes[0].prompts[0] < 1000
    assert sizes[1].num_tokens[0] > sizes[0].num_tokens[0] + 100
    assert 2 * len(data) < images_bytes(request.images) < 2 * len(data) + 1000
