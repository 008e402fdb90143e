"""`[models.NAME]`: several models, each with the settings of the file's top and its own."""

from pathlib import Path

import pytest

from pipeline.config.load import ConfigError, load
from pipeline.config.models import load_server

TWO = """
max_model_len = 512
[execute]
kv_cache_bytes = "16MiB"
[models.chat]
model = "/a"
pinned = true
[models."qwen3:0.6b"]
model = "qwen3:0.6b"
aliases = ["small"]
idle_unload_s = 60
[models."qwen3:0.6b".execute]
kv_cache_bytes = "8MiB"
"""


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return path


def problems_of(tmp_path: Path, text: str, *sets: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_server(file_of(tmp_path, text), sets)
    return "\n".join(raised.value.problems)


def test_a_models_settings_are_those_of_the_top_with_its_own_on_them(tmp_path: Path) -> None:
    sets = ["models.chat.schedule.max_num_seqs=3", 'models."qwen3:0.6b".max_model_len=64', "execute.num_threads=1"]
    server = load_server(file_of(tmp_path, TWO), sets)
    chat, small = server.models["chat"], server.models["qwen3:0.6b"]
    assert list(server.models) == ["chat", "qwen3:0.6b"], "in the order of the file"
    assert (chat.model, chat.served_model_name, chat.pinned, chat.max_model_len) == ("/a", "chat", True, 512)
    assert chat.execute.kv_cache_bytes == 16 * 1024**2 and chat.schedule.max_num_seqs == 3
    assert (small.execute.kv_cache_bytes, small.max_model_len, small.execute.num_threads) == (8 * 1024**2, 64, 1)
    assert (small.aliases, small.idle_unload_s, small.pinned) == (("small",), 60.0, False)


def test_models_of_the_command_line_are_named_by_themselves_or_as_given(tmp_path: Path) -> None:
    weights = tmp_path / "tiny.gguf"
    weights.touch()
    server = load_server(models=["qwen3:0.6b", f"chat={tmp_path}", str(weights)])
    assert [one.model for one in server.models.values()] == ["qwen3:0.6b", str(tmp_path), str(weights)]
    assert list(server.models) == ["qwen3:0.6b", "chat", "tiny"]
    with pytest.raises(ConfigError, match="there is a model chat already"):
        load_server(models=["chat=a", "chat=b"])


def test_one_model_has_no_tables_and_its_settings_are_as_ever(tmp_path: Path) -> None:
    path = file_of(tmp_path, 'model = "/a"\naliases = ["b"]\n')
    assert load_server(path).models == {} and load_server(path).shared == load(path)


def test_a_key_of_the_whole_server_is_refused_in_a_models_table(tmp_path: Path) -> None:
    found = problems_of(tmp_path, TWO + "[models.chat.gateway]\nport = 1\n", "models.chat.log_level=debug")
    assert "[models.chat]: gateway.port: is of the whole server" in found
    assert "--set log_level=debug: is of the whole server" in found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('model = "/b"\n' + TWO, "model: can't be the same for several models"),
        ("[models.a]\nmax_model_len = 1\n", "[models.a]: needs a model"),
        ("[models.a]\nmodel = '/a'\nserved_model_name = 'b'\n", "the name of the table is the model's"),
        ("[models.a]\nmodel = '/a'\nmax_modle_len = 1\n", "did you mean max_model_len?"),
        ("[models.a]\nmodel = '/a'\n[models.a.schedule]\nblock_size = 0\n", "[models.a]: schedule.block_size: needs"),
        ("[models.a]\nmodel = '/a'\n[models.b]\nmodel = '/b'\naliases = ['a']\n", "'a' is a name of a already"),
        (
            "[models.a]\nmodel = '/a'\n[models.b]\nmodel = '/b'\n[models.b.lora.adapters]\na = '/x'\n",
            "[models.b]: lora.adapters: 'a' is a name of a already",
        ),
        ("[models.' x']\nmodel = '/a'\n", "a name has 1 to 128 letters"),
        ("models = 1\n", "has a table for each model"),
        ("[models]\na = 1\n", "models.a: is a table"),
        (TWO + "[gateway]\nreplicas = 2\n", "gateway.replicas: several models have one gateway"),
        (
            "[execute]\nlauncher = 'ray'\n[models.a]\nmodel = '/a'\n",
            "execute.launcher: several models run on this machine",
        ),
        (TWO + "[models.chat.execute]\nlauncher = 'ray'\n", "[models.chat]: execute.launcher: several models run on"),
        ("[execute]\ndevice = 'cuda'\n[models.a]\nmodel = '/a'\n", "memory_bytes: with several models on a GPU"),
        ("[execute]\ndevice = 'cuda'\n[models.a]\nmodel = '/a'\n", "[models.a]: execute.kv_cache_bytes: with several"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in problems_of(tmp_path, text)


def test_a_setting_of_no_model_is_refused(tmp_path: Path) -> None:
    assert "there is no model 'chta'; did you mean chat?" in problems_of(tmp_path, TWO, "models.chta.pinned=true")


def test_commands_for_one_model_refuse_the_tables(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only `pipeline serve` and `pipeline config` take"):
        load(file_of(tmp_path, TWO))


def test_an_alias_is_another_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="aliases: each must be another name"):
        load(file_of(tmp_path, 'served_model_name = "a"\naliases = ["a"]\n'))
