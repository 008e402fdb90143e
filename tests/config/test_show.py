"""Settings as TOML: every key is explained, and the output loads again."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from pipeline.config.keys import Key, needs, sections, value_of
from pipeline.config.load import load, presets
from pipeline.config.models import ServerSettings, load_server
from pipeline.config.rules import remarks
from pipeline.config.settings import Settings
from pipeline.config.show import as_toml, server_as_toml
from pipeline.stages.prepare.sources import library

ALL_KEYS = [key for section in sections() for key in section.keys]


@pytest.mark.parametrize("key", ALL_KEYS, ids=lambda key: key.dotted)
def test_every_key_is_described_with_its_default(key: Key) -> None:
    assert key.description.endswith(".")
    assert needs(key)
    assert msgspec.convert(key.default, key.annotation) == key.default
    assert value_of(Settings(), key) == key.default


def test_every_section_is_described() -> None:
    assert [section.name for section in sections() if not section.description.endswith(".")] == []


def test_every_field_of_the_tree_is_a_key() -> None:
    def count(tree: dict[str, Any]) -> int:
        return sum(count(value) if isinstance(value, dict) and value else 1 for value in tree.values())

    assert len(ALL_KEYS) == count(msgspec.to_builtins(Settings()))


@pytest.mark.parametrize("name", presets())
def test_shown_settings_load_again(name: str, tmp_path: Path) -> None:
    server = load_server(presets()[name])
    path = tmp_path / "shown.toml"
    path.write_text(server_as_toml(server), "utf-8")
    assert load_server(path) == server


def test_of_several_models_the_differences_are_shown_and_load_again(tmp_path: Path) -> None:
    given, shown = tmp_path / "given.toml", tmp_path / "shown.toml"
    given.write_text(
        "memory_bytes = '4GiB'\n[execute]\nkv_cache_bytes = '64MiB'\n[models.a]\nmodel = 'x'\npinned = true\n"
        "[models.'qwen3:0.6b']\nmodel = 'y'\naliases = ['q\"']\n[models.'qwen3:0.6b'.execute]\nkv_cache_bytes = 0\n",
        "utf-8",
    )
    text = server_as_toml(server := load_server(given))
    shown.write_text(text, "utf-8")
    assert load_server(shown) == server
    assert text.endswith(
        '[models."a"]\nmodel = "x"\npinned = true\n\n[models."qwen3:0.6b"]\nmodel = "y"\naliases = ["q\\""]\n\n'
        '[models."qwen3:0.6b".execute]\nkv_cache_bytes = 0\n'
    )


def test_the_models_of_presets_are_well_known_names() -> None:
    models = [one.model for path in presets().values() for one in load_server(path).models.values()]
    assert models and [name for name in models if library.find(name) is None] == []


@given(
    name=st.text(st.characters(exclude_categories=["Cs"])),
    num_bytes=st.integers(2**20, 2**50),
    wait=st.floats(1e-6, 1e6),
)
def test_any_value_loads_again(name: str, num_bytes: int, wait: float) -> None:
    settings = msgspec.structs.replace(
        Settings(),
        served_model_name=name,
        execute=msgspec.structs.replace(Settings().execute, kv_cache_bytes=num_bytes),
        supervisor=msgspec.structs.replace(Settings().supervisor, stop_timeout_s=wait),
    )
    shown = tomllib.loads(as_toml(settings))
    assert shown["served_model_name"] == name
    assert shown["supervisor"]["stop_timeout_s"] == wait
    written = shown["execute"]["kv_cache_bytes"]
    assert load(sets=[f"execute.kv_cache_bytes={written}"]).execute.kv_cache_bytes == num_bytes


def test_the_default_preset_is_what_config_show_prints() -> None:
    assert presets()["default"].read_text("utf-8") == as_toml(Settings()), (
        "the settings have changed: run `pipeline config show > config/presets/default.toml`"
    )


def _remarks(server: ServerSettings) -> list[str]:
    return [text for one in (server.shared, *server.models.values()) for text in remarks(one)]


def test_presets_cause_no_remarks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name: _remarks(load_server(path)) for name, path in presets().items()} == {name: [] for name in presets()}


def test_presets_begin_with_their_purpose() -> None:
    assert [name for name, path in presets().items() if not path.read_text("utf-8").startswith("# ")] == []


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (["schedule.max_num_batched_tokens=16"], "schedule.max_num_seqs"),
        (["execute.num_threads=4096"], "execute.num_threads"),
        (["supervisor.health_timeout_s=500"], "supervisor.health_timeout_s"),
        (["execute.gpu_memory_utilization=0.5"], "execute.gpu_memory_utilization"),
        (["gateway.api_keys_file=keys", "gateway.allowed_hosts=a.example"], "gateway.allowed_hosts"),
        (
            ["execute.device=cuda", "execute.gpu_memory_utilization=0.5", "execute.kv_cache_bytes=1GiB"],
            "execute.gpu_memory_utilization",
        ),
    ],
)
def test_options_with_little_or_no_effect_cause_a_remark(sets: list[str], key: str) -> None:
    (remark,) = remarks(load(sets=sets))
    assert remark.startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (bool, "true or false"),
        (int, "a whole number"),
        (Annotated[int, Meta(ge=1)], "a whole number of at least 1"),
        (Annotated[int, Meta(le=9)], "a whole number of at most 9"),
        (Annotated[int, Meta(ge=1, le=9)], "a whole number from 1 to 9"),
        (Annotated[float, Meta(gt=0)], "a number above 0"),
        (Annotated[float, Meta(gt=0, le=1)], "a number above 0 and at most 1"),
        (Annotated[float, Meta(ge=0, lt=1)], "a number of at least 0 and below 1"),
        (Annotated[str, Meta(min_length=1)], "a text that is not empty"),
        (list[Annotated[int, Meta(ge=1)]], "a list, each entry a whole number of at least 1"),
        (int | None, "a whole number"),
    ],
)
def test_types_are_described_in_english(annotation: Any, words: str) -> None:
    tree: Any = msgspec.defstruct("Tree", [("key", annotation)])
    ((key,),) = (section.keys for section in sections(tree))
    assert needs(key) == words


def test_unset_values_lists_and_tables_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.config import show

    tree: Any = msgspec.defstruct(
        "Tree",
        [
            ("a", Annotated[int | None, Meta(description="A.")], None),
            ("b", Annotated[list[str], Meta(description="B.")], msgspec.field(default_factory=list)),
            ("c", Annotated[dict[str, int], Meta(description="C.")], msgspec.field(default_factory=dict)),
        ],
    )
    monkeypatch.setattr(show, "sections", lambda: sections(tree))
    text = as_toml(tree(b=['x"', "y\x7f"], c={"k k": 1}))
    assert tomllib.loads(text) == {"b": ['x"', "y\x7f"], "c": {"k k": 1}}
    assert "# a is not set" in text
