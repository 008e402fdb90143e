"""A folder has the chat templates that transformers' tokenizer has, and the setting `chat_template` replaces them.

PIPELINE_ALL_CASES=1 pytest tests/stages/prepare/tokenizers/test_chat_templates.py      all combinations of files
"""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import notes_of
from pipeline.stages.prepare.drafts.draft import settings_of_draft
from pipeline.stages.prepare.sharing import CONTENT
from pipeline.stages.prepare.sources import chat_templates
from pipeline.stages.prepare.sources.hub.fetch import _wanted
from pipeline.stages.prepare.sources.source import HubSource, ModelError
from pipeline.stages.prepare.stage import prepare

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"
TOOLS = [{"type": "function", "function": {"name": "find"}}]
NAMED = {"default": "config default", "tool_use": "config tools", "rag": "config rag"}
FORMS: list[Any] = [
    None,
    "config",
    [{"name": name, "template": text} for name, text in NAMED.items()],
    [{"name": "tool_use", "template": "config tools"}],
    NAMED,
    {"default": "config default"},
    {"rag": "config rag"},
]
"""`chat_template` in tokenizer_config.json."""
ADDITIONAL = [set(names) for n in range(4) for names in itertools.combinations(("default", "tool_use", "rag"), n)]
CASES = list(itertools.product((False, True), ADDITIONAL, range(len(FORMS))))
if not os.environ.get("PIPELINE_ALL_CASES"):
    CASES = CASES[::4]


def settings_of(source: Path, **changes: Any) -> Settings:
    return Settings(model=str(source), cache_dir=str(source.parent / "cache"), **changes)


def written(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.jinja")}


def write(source: Path, name: str, value: Any) -> None:
    path = source / name
    path.parent.mkdir(exist_ok=True)
    kept = json.loads(path.read_text()) if name.endswith(".json") and path.exists() else {}
    path.write_text(value if isinstance(value, str) else json.dumps({**kept, **value}))


def theirs(source: Path) -> Iterator[tuple[str, str]]:
    """The template for chats without and with tools, unless transformers refuses the chat."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    for kind, tools in (("default", None), ("tool_use", TOOLS)):
        try:
            yield kind, tokenizer.get_chat_template(None, tools)
        except ValueError:
            continue


@pytest.mark.parametrize(("has_file", "additional", "form"), CASES)
def test_a_chat_has_the_template_of_transformers(source: Path, has_file: bool, additional: set[str], form: int) -> None:
    if has_file:
        write(source, "chat_template.jinja", "file")
    for name in additional:
        write(source, f"additional_chat_templates/{name}.jinja", f"additional {name}")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": FORMS[form]}
    write(source, "tokenizer_config.json", json.dumps(config))
    ours = chat_templates.templates_of(source, config).by_name
    for kind, template in theirs(source):
        assert (ours.get(kind) or ours.get("default")) == template


def test_an_object_of_templates_and_an_additional_default_are_prepared(source: Path) -> None:
    write(source, "tokenizer_config.json", {"chat_template": NAMED})
    first = prepare(settings_of(source))
    expected = {"chat_template.jinja": "config default", "chat_template.tool_use.jinja": "config tools"}
    assert written(first) == expected
    assert "tokenizer_config.json: the chat templates named ['rag'] are not used" in notes_of(first)
    write(source, "additional_chat_templates/default.jinja", "additional")
    assert written(prepare(settings_of(source))) == {"chat_template.jinja": "additional"}
    write(source, "additional_chat_templates/default.jinja", "changed")
    assert written(prepare(settings_of(source))) == {"chat_template.jinja": "changed"}


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_a_template_that_only_the_processor_has_is_used(source: Path, name: str) -> None:
    write(source, name, {"chat_template": "of the processor"})
    folder = prepare(settings_of(source))
    assert written(folder) == {"chat_template.jinja": "of the processor"}
    assert f"the chat template is that of {name}, because the tokenizer has none" in notes_of(folder)
    write(source, "tokenizer_config.json", {"chat_template": "of the tokenizer"})
    folder = prepare(settings_of(source))
    assert written(folder) == {"chat_template.jinja": "of the tokenizer"}
    line = f"the chat template is that of tokenizer_config.json; the one in {name} differs and is not used"
    assert line in notes_of(folder)
    write(source, name, {"chat_template": "of the tokenizer"})
    assert not any("chat template" in note for note in notes_of(prepare(settings_of(source))))
    write(source, name, "no JSON")
    assert written(prepare(settings_of(source))) == {"chat_template.jinja": "of the tokenizer"}, "it isn't needed"


def test_each_template_that_does_not_count_is_named(source: Path) -> None:
    """Three files and a processor's may have templates; transformers takes the first."""

    def lines() -> list[str]:
        return [note for note in notes_of(prepare(settings_of(source))) if "template" in note]

    write(source, "tokenizer_config.json", {"chat_template": "of the tokenizer"})
    write(source, "chat_template.jinja", "of the file")
    differs = "the chat template is that of {}; the one in {} differs and is not used"
    assert lines() == [differs.format("chat_template.jinja", "tokenizer_config.json")]
    write(source, "additional_chat_templates/default.jinja", "additional")
    write(source, "additional_chat_templates/rag.jinja", "additional")
    default = "additional_chat_templates/default.jinja"
    assert lines() == [
        "additional_chat_templates: the chat templates named ['rag'] are not used",
        differs.format(default, "chat_template.jinja"),
        differs.format(default, "tokenizer_config.json"),
    ]
    write(source, "tokenizer_config.json", {"chat_template": {"default": "additional", "tool_use": "x"}})
    write(source, "chat_template.jinja", "additional")
    assert lines()[1:] == [
        f"the chat template for tools in tokenizer_config.json is not used, because that of {default} counts"
    ]
    write(source, "tokenizer_config.json", {"chat_template": 7})
    assert len(lines()) == 1, "it isn't needed"


@pytest.mark.parametrize("value", [7, ["{{ one }}"], [{"name": "default"}], {"default": 3}, [[]], True])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_templates_of_other_kinds_are_refused_by_file(source: Path, name: str, value: Any) -> None:
    write(source, name, {"chat_template": value})
    with pytest.raises(ModelError, match=rf"{name}: chat_template must be a template, or several by name"):
        prepare(settings_of(source))


def test_without_a_default_the_start_says_that_chats_are_refused(source: Path) -> None:
    write(source, "tokenizer_config.json", {"chat_template": {"rag": "x"}})
    folder = prepare(settings_of(source))
    assert written(folder) == {}
    assert any("none is named 'default': set chat_template" in note for note in notes_of(folder))


def test_the_hubs_named_templates_are_fetched() -> None:
    names = ["config.json", "model.safetensors", "chat_template.json", "additional_chat_templates/rag.jinja"]
    names += ["additional_chat_templates/default.jinja", "additional_chat_templates/tool_use.jinja"]
    found = _wanted(HubSource("org/tiny", "main"), names, Path)
    assert sorted(found) == sorted(set(names) - {"additional_chat_templates/rag.jinja"})


def test_a_given_template_replaces_those_of_the_model(source: Path, tmp_path: Path) -> None:
    """In a folder of its own, which shares the weights: the model's stays as it is."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|call|>", "<|return|>"])
    tokenizer.save(str(source / "tokenizer.json"))
    write(source, "tokenizer_config.json", {"chat_template": NAMED})
    given = tmp_path / "given.jinja"
    given.write_text((TEMPLATES / "gpt-oss.jinja").read_text())
    quantized = settings_of(source, quantization="q8_0")
    plain = prepare(quantized)
    (plain / CONTENT).write_text("a digest")
    before = written(plain)
    with_given = msgspec.structs.replace(quantized, chat_template=str(given))
    folder = prepare(with_given)
    assert folder != plain and prepare(with_given) == folder
    assert written(folder) == {"chat_template.jinja": given.read_text()} and written(plain) == before
    assert (folder / "model.safetensors").samefile(plain / "model.safetensors")
    assert not (folder / CONTENT).exists(), "or another .gguf file of the same content got this template"
    ends = [tokenizer.token_to_id(text) for text in ("<|call|>", "<|return|>")]
    assert ModelConfig.load(folder).eos_ids == [*ModelConfig.load(plain).eos_ids, *ends], "the ends of its replies"
    given.write_text("{{ messages }}")
    assert written(prepare(with_given)) == {"chat_template.jinja": "{{ messages }}"}
    assert settings_of_draft(with_given).chat_template == ""


def test_without_hard_links_the_weights_are_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr("os.link", link)
    (tmp_path / "given.jinja").write_text("given")
    quantized = settings_of(source, quantization="q8_0")
    folder = prepare(msgspec.structs.replace(quantized, chat_template=str(tmp_path / "given.jinja")))
    assert (folder / "model.safetensors").read_bytes() == (prepare(quantized) / "model.safetensors").read_bytes()
    assert written(folder) == {"chat_template.jinja": "given"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"given\.jinja is missing, or no regular file; give a file with a Jinja template"),
        (b"\xff", r"given\.jinja is not UTF-8 text"),
        (b" \n", r"given\.jinja is empty"),
        (b"x" * (2**20 + 1), r"given\.jinja has 1048577 bytes; at most 1048576 are allowed"),
    ],
)
def test_a_given_template_that_cant_be_read_is_an_error_before_the_model_is_prepared(
    source: Path, tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "given.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"\Achat_template: .*{words}"):
        prepare(settings_of(source, chat_template=str(path)))
    with pytest.raises(ModelError, match=r"no regular file"):
        prepare(settings_of(source, chat_template=str(tmp_path)))
    assert not (tmp_path / "cache").exists()
