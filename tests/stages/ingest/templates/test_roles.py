"""Messages of roles that the API does not have: a template writes them, or their request is refused."""

import pytest

from pipeline.runtime.messages import ChatMessage, ChatPrompt
from pipeline.stages.ingest.templates.chat_templates import ChatTemplates
from pipeline.stages.ingest.templates.conversation import BadChat
from pipeline.stages.ingest.templates.template import ChatTemplate, TemplateFailure

EVERY_ROLE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
KNOWN_ROLES = (
    "{% for m in messages %}{% if m['role'] in ('user', 'ipython') %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% endif %}{% endfor %}"
)
STRICT = "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('only users') }}{% endif %}{% endfor %}"


def render(source: str, *messages: ChatMessage, continues: bool = False, is_short: bool = True) -> str:
    templates = ChatTemplates({"default": ChatTemplate(source)}, "", timeout_s=10.0)
    prompt = ChatPrompt(list(messages), add_generation_prompt=False, continue_final_message=continues)
    return templates.text(prompt, max_chars=1000, now_s=0.0, is_short=is_short)


HI = ChatMessage("user", "Hi")


@pytest.mark.parametrize("is_short", [True, False])
def test_a_template_for_every_role_takes_every_role(is_short: bool) -> None:
    critic = ChatMessage("my-critic", "Hi\nthere", parts=["Hi", "there"])
    assert render(EVERY_ROLE, HI, critic, HI, is_short=is_short) == "<user>Hi<my-critic>Hi\nthere<user>Hi"


def test_a_template_that_names_its_roles_takes_those() -> None:
    assert render(KNOWN_ROLES, HI, ChatMessage("ipython", "4")) == "<user>Hi<ipython>4"


def test_a_message_that_the_template_omits_is_refused() -> None:
    """Even if its text occurs elsewhere in the prompt."""
    with pytest.raises(BadChat, match=r"'messages\[2\]\.role': .* ignores messages of the role 'critic'") as caught:
        render(KNOWN_ROLES, HI, ChatMessage("ipython", "Hi"), ChatMessage("critic", "Hi"))
    assert caught.value.param == "messages[2].role"


def test_a_message_that_the_template_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(TemplateFailure, match="only users"):
        render(STRICT, HI, ChatMessage("critic", "Hi"))


def test_a_message_of_another_role_can_be_continued_and_may_be_empty() -> None:
    assert render(EVERY_ROLE, HI, ChatMessage("critic", "I say "), continues=True) == "<user>Hi<critic>I say "
    assert render(EVERY_ROLE, ChatMessage("critic", "")) == "<critic>"


def test_the_api_s_own_roles_are_left_to_the_template() -> None:
    assert render(KNOWN_ROLES, ChatMessage("tool", "4", tool_call_id="c1"), HI) == "<user>Hi"


@pytest.mark.parametrize(("role", "meant"), [("usr", "user"), ("asistant", "assistant"), ("System", "system")])
def test_a_misspelled_role_is_refused_unless_the_template_mentions_it(role: str, meant: str) -> None:
    with pytest.raises(BadChat, match=rf"'messages\[1\]\.role' must be system, .*{role}'; did you mean {meant}\?"):
        render(EVERY_ROLE, HI, ChatMessage(role, "Hi"))
    assert render(f"{{# {role} #}}{EVERY_ROLE}", ChatMessage(role, "Hi")) == f"<{role}>Hi"


def test_each_omitted_message_is_found_among_many() -> None:
    source = "{% for m in messages %}{% if m.content != 'no' %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    many = [ChatMessage(f"role{index}", f"text {index}") for index in range(30)]
    text = render(source, *many, is_short=False)
    assert "role29: text 29" in text
    only_some = "{% for m in messages[:25] %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(BadChat, match=r"messages\[25\]"):
        render(only_some, *many, is_short=False)
