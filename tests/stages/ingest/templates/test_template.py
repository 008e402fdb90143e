"""The chat template's environment is the standard one, and all errors are clear."""

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import UserError
from pipeline.runtime.messages import ChatMessage, ChatPrompt
from pipeline.stages.ingest.templates.chat_templates import require_valid
from pipeline.stages.ingest.templates.template import MAX_WORDS_CHARS, ChatTemplate, TemplateFailure, TextTooLong
from tests.slices import part_of
from tests.stages.ingest.templates import chats

USER = [ChatMessage("user", "hi")]


def render(source: str, messages: list[ChatMessage] = USER, *, prompt: bool = True, max_chars: int = 10_000) -> str:
    return chats.render(source, ChatPrompt(messages, add_generation_prompt=prompt), max_chars=max_chars)


TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "blocks_on_lines": (
        "{{ bos_token }}\n  {% for message in messages %}\n    {% if loop.index > 2 %}\n{% break %}\n    {% endif %}\n"
        "{{ message.role | upper }}: {{ message.content | trim }}{{ eos_token }}\n  {% endfor %}\n"
    ),
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "generation_tag": ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        "{% if tools is defined and tools %}tools{% endif %}{% if not documents %}none{% endif %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_in_transformers(name: str, prompt: bool) -> None:
    messages = [ChatMessage("system", " <b>be</b> 'nice' "), ChatMessage("user", "héllo\n"), ChatMessage("user", "ü")]
    plain: chats.Chat = [{"role": message.role, "content": message.content} for message in messages]
    expected = chats.by_transformers(TEMPLATES[name], plain, add_generation_prompt=prompt)
    assert render(TEMPLATES[name], messages, prompt=prompt) == expected


def test_the_date_is_available() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_a_message_has_a_name_only_if_the_client_sent_one() -> None:
    source = "{% for m in messages %}{{ m.name if 'name' in m else '-' }}{% endfor %}"
    assert render(source, [ChatMessage("user", "a", "Ann"), ChatMessage("user", "b")]) == "Ann-"


def test_an_error_of_the_template_reaches_the_client() -> None:
    with pytest.raises(TemplateFailure, match="Conversation roles must alternate"):
        render("{{ raise_exception('Conversation roles must alternate') }}")


def test_error_messages_that_quote_the_client_are_truncated_and_valid_utf8() -> None:
    with pytest.raises(TemplateFailure) as caught:
        render("{{ raise_exception(messages[0].content) }}", [ChatMessage("user", "\ud800" + "x" * 100_000)])
    assert len(str(caught.value).encode()) < MAX_WORDS_CHARS + 100


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.lower() }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 3 }}",
        "{% for i in range(10 ** 12) %}x{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro deep(n) %}{{ deep(n + 1) }}{% endmacro %}{{ deep(0) }}",
        "{{ strftime_now(7) }}",
        "{% set ns = namespace(n=1) %}{% set ns.__class__ = 'x' %}{{ ns.n }}",
        "{{ namespace(_hidden=1) }}",
    ],
)
def test_a_failing_template_fails_only_the_request(source: str) -> None:
    with pytest.raises(TemplateFailure, match="refused the messages"):
        render(source)
    assert sys.getrecursionlimit() >= 1000


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for message in %}", "Expected an expression"),
        ("{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}", "RecursionError"),
        ("{{ " + "9" * 5000 + " }}", "ValueError: Exceeds the limit"),
    ],
)
def test_an_invalid_template_raises_an_error_when_it_is_loaded(source: str, words: str) -> None:
    with pytest.raises(TemplateFailure, match=f"not valid: .*{words}"):
        ChatTemplate(source)
    assert sys.getrecursionlimit() >= 1000


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for message in %}", "it is not valid: Expected an expression"),
        ("{{ messages|xmlattr }}", "it is not valid: No filter named 'xmlattr'"),
        ("x" * (2**18 + 1), "it is longer than 262144 characters"),
        ("{{ messages }}", ""),
    ],
)
def test_an_invalid_template_of_the_setting_ends_the_start(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    if not words:
        require_valid(tmp_path, "my.jinja")
        return
    with pytest.raises(UserError, match=rf"\Achat_template my\.jinja: {words}"):
        require_valid(tmp_path, "my.jinja")


def test_rendering_stops_at_the_length_limit() -> None:
    with pytest.raises(TextTooLong):
        render("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", max_chars=5000)


@settings(max_examples=part_of(100, 25), deadline=None)
@given(st.lists(st.tuples(st.text(st.characters()), st.text(st.characters())), max_size=5))
def test_message_content_is_never_interpreted_as_a_template(pairs: list[tuple[str, str]]) -> None:
    messages = [ChatMessage(role, content) for role, content in pairs]
    written = "".join(role + "|" + content for role, content in pairs)
    assert render("{% for m in messages %}{{ m.role }}|{{ m.content }}{% endfor %}", messages) == written
