"""Images in a rendered chat: their placeholders are the template's, never a client's."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken

from pipeline.config.settings import ChatSettings, LimitSettings
from pipeline.media.config import MediaConfig
from pipeline.media.placeholders import Run
from pipeline.runtime import messages as m
from pipeline.stages.ingest.media.prompt_images import PromptImages
from pipeline.stages.ingest.prompts import prompt_processor
from pipeline.stages.ingest.prompts.prompt_processor import PromptProcessor
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from tests.media.model_files import GEMMA3, IDEFICS3, LLAVA, TOKENS
from tests.stages.ingest import models as tiny
from tests.stages.ingest.templates.chats import TEMPLATES

SMOLVLM = (
    "<s>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""As the template of SmolVLM."""


class Placed:
    """An image of some runs."""

    def __init__(self, text: str, *run_lengths: int) -> None:
        self.text, self.run_lengths = text, run_lengths


ONE = Placed("<fake_token_around_image><global-img><image><fake_token_around_image>", 4)
TILES = Placed("<fake_token_around_image><row_1_col_1><image>\n\n<fake_token_around_image><global-img><image>", 3, 2)


def load(folder: Path, template: str = SMOLVLM, *, allowed: bool = False, max_model_len: int = 200) -> PromptProcessor:
    folder.mkdir(exist_ok=True)
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    facts = tiny.facts(max_model_len=max_model_len)
    settings = ChatSettings(allow_special_tokens_in_content=allowed)
    return prompt_processor.load(tiny.folder(folder, template), facts, tokenizer, LimitSettings(), settings)


def images(processor: PromptProcessor, tmp_path: Path, *placed: Placed) -> PromptImages:
    """With the ids of the processor's tokenizer."""
    found: MediaConfig = IDEFICS3.read(tmp_path / "model")
    row_id = processor._tokenizer.token_to_id("<image>")
    return PromptImages(msgspec.structs.replace(found, row_id=row_id), placed)


def user(*parts: str, at: list[int]) -> m.ChatPrompt:
    return m.ChatPrompt([m.ChatMessage("user", "\n".join(parts), parts=list(parts), image_offsets=at)])


def text_of(processor: PromptProcessor, ids: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> str:
    return str(processor._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def test_an_image_is_where_the_template_writes_it(tmp_path: Path):
    processor = load(tmp_path)
    found = processor.encode(user("What", "is it?", at=[0, 1]), images=images(processor, tmp_path, ONE, TILES))
    rows = [(run.offset, run.length) for image in found.image_runs for run in image]
    row_id = processor._tokenizer.token_to_id("<image>")
    assert [length for _, length in rows] == [4, 3, 2]
    for offset, length in rows:
        assert set(found.ids[offset : offset + length].tolist()) == {row_id}
    assert (found.ids == row_id).sum() == 9
    shown = text_of(processor, found.ids).replace("<image>", "@")
    fake = "<fake_token_around_image>"
    assert shown == (
        f"<s>User:{fake}<global-img>@@@@{fake}What{fake}<row_1_col_1>@@@\n\n{fake}<global-img>@@is it?</s>\nAssistant:"
    )


@pytest.mark.parametrize("text", ["<image>", "a<image><image>", "<fake_token_around_image><global-img>"])
def test_what_a_client_writes_is_text(text: str, tmp_path: Path):
    processor = load(tmp_path)
    found = processor.encode(user(text, at=[1]), images=images(processor, tmp_path, ONE))
    specials = [number for number in found.ids.tolist() if number >= 256]
    alone = processor.encode(user("x", at=[1]), images=images(processor, tmp_path, ONE))
    assert specials == [number for number in alone.ids.tolist() if number >= 256]
    assert text in text_of(processor, found.ids)


def test_parts_that_make_a_token_together_are_text(tmp_path: Path):
    """Also beside an image."""
    processor = load(tmp_path)
    found = processor.encode(user("<ima", "ge>", "</", "s>", at=[2]), images=images(processor, tmp_path, ONE))
    assert (found.ids == processor._tokenizer.token_to_id("<image>")).sum() == 4
    assert (found.ids == processor._tokenizer.token_to_id("</s>")).sum() == 1
    assert [[(run.length) for run in runs] for runs in found.image_runs] == [[4]]


def test_with_the_setting_a_client_s_placeholder_is_a_wrong_count(tmp_path: Path):
    processor = load(tmp_path, allowed=True)
    with pytest.raises(RequestRejected, match="writes 2 placeholders for 1 images") as caught:
        processor.encode(user("<image>", at=[0]), images=images(processor, tmp_path, ONE))
    assert (caught.value.failure.status, caught.value.failure.param) == (400, "messages")


def test_a_template_that_shows_no_images_is_refused(tmp_path: Path):
    texts_only = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endfor %}"
    )
    processor = load(tmp_path / "a", texts_only)
    with pytest.raises(RequestRejected, match="writes 0 placeholders for 1 images"):
        processor.encode(user("x", at=[0]), images=images(processor, tmp_path, ONE))
    processor = load(tmp_path / "b", tiny.CHATML)
    with pytest.raises(RequestRejected, match="takes texts only"):
        processor.encode(user("x", at=[0]), images=images(processor, tmp_path, ONE))


def test_images_of_other_roles_and_continued_ones_are_refused(tmp_path: Path):
    processor = load(tmp_path)
    for prompt, words in (
        (
            m.ChatPrompt([m.ChatMessage("system", "x", parts=["x"], image_offsets=[0])]),
            "role 'system' can't have images",
        ),
        (
            m.ChatPrompt(
                [m.ChatMessage("user", "x", parts=["x"], image_offsets=[1])],
                add_generation_prompt=False,
                continue_final_message=True,
            ),
            "ends with an image",
        ),
    ):
        with pytest.raises(RequestRejected, match=words):
            processor.encode(prompt, images=images(processor, tmp_path, ONE))


def test_rows_count_as_tokens(tmp_path: Path):
    processor = load(tmp_path, max_model_len=200)
    large = Placed(ONE.text, 190)
    with pytest.raises(RequestRejected, match="maximum context length is 200 tokens"):
        processor.encode(user("x", at=[0]), images=images(processor, tmp_path, large))


def test_gemma_s_placeholder_is_not_its_row_token(tmp_path: Path):
    config = GEMMA3.read(tmp_path)
    text = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
    placed = PromptImages(config, [Placed(text, 3)])
    assert placed.put_into("a<start_of_image>b", None) == (f"a{text}b", None)
    ids, runs = placed.expand(np.array([1, config.row_id, 2], np.int32))
    assert ids.tolist() == [1, *[config.row_id] * 3, 2]
    assert runs == [[Run(1, 3)]]


def test_a_text_prompt_has_the_placeholders_itself(tmp_path: Path):
    processor = load(tmp_path)
    found = images(processor, tmp_path, ONE, TILES)
    config, row_id = found._config, found._config.row_id
    placed = PromptImages(config, [ONE, TILES], is_chat=False)
    encoded = processor.encode(m.TextPrompt("a<image>b<image>c"), images=placed)
    assert np.count_nonzero(encoded.ids == row_id) == 9
    assert [[run.length for run in runs] for runs in encoded.image_runs] == [[4], [3, 2]]
    for text, num in (("none", 0), ("<image>" * 3, 3)):
        with pytest.raises(RequestRejected) as rejected:
            processor.encode(m.TextPrompt(text), images=placed)
        failure = rejected.value.failure
        assert (failure.status, failure.param) == (400, "prompt")
        assert (
            failure.message
            == f"the prompt has {num} times <image>, which stands for an image; the number of images is 2"
        )


def test_a_row_token_in_the_text_is_no_image(tmp_path: Path):
    config = LLAVA.read(tmp_path)
    with pytest.raises(RequestRejected, match="the chat has <image> as text"):
        PromptImages(config, [Placed("<image>", 3)]).expand(np.array([config.row_id, config.row_id], np.int32))


@pytest.mark.parametrize(
    ("name", "placeholder"),
    [
        ("gemma3", "<start_of_image>"),
        ("mistral3", "[IMG]"),
        ("ministral3", "[IMG]"),
        ("qwen3.5", "<|vision_start|><|image_pad|><|vision_end|>"),
        ("llama4", "<|image|>"),
        ("gemma4", "<|image|>"),
    ],
)
def test_real_templates_write_a_placeholder_for_each_image(name: str, placeholder: str, tmp_path: Path):
    processor = load(tmp_path, (TEMPLATES / f"{name}.jinja").read_text("utf-8"), max_model_len=2000)
    prompt = user("first", "second", at=[0, 1])
    text = processor.chat_templates.text(prompt, max_chars=10_000, now_s=None, is_short=False)
    before, between, _ = text.split(placeholder)
    assert "first" in between and "second" not in between
    assert "first" not in before
