"""Loading settings: sources, precedence and error messages."""

import os
from pathlib import Path

import pytest
from msgspec import inspect

from pipeline.config.keys import Key, needs, sections
from pipeline.config.load import ConfigError, load, presets, size_in_bytes
from pipeline.config.models import ServerSettings, load_server
from pipeline.config.renamed import RENAMED, with_new_names
from pipeline.config.settings import Settings


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text, "utf-8")
        return path

    return write


def problems_of(
    path: Path | None = None, sets: list[str] | None = None, flags: dict[str, str] | None = None
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, sets or [], flags)
    return caught.value.problems


def test_without_input_the_settings_are_the_defaults() -> None:
    assert load() == Settings()


def test_flags_override_sets_and_sets_override_the_file(write) -> None:
    path = write('served_model_name = "a"\n[gateway]\nport = 1\n[schedule]\nmax_num_seqs = 3\n')
    settings = load(
        path, ["gateway.port=2", "schedule.max_num_seqs=4", "schedule.max_num_seqs=5"], {"gateway.port": "3"}
    )
    assert (settings.served_model_name, settings.schedule.max_num_seqs, settings.gateway.port) == ("a", 5, 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("served_model_name=plain", "plain"),
        ('served_model_name="quoted"', "quoted"),
        ("served_model_name=123", "123"),
        ("served_model_name=true", "true"),
        ("served_model_name=a=b", "a=b"),
        ("served_model_name = a b ", "a b"),
        ("served_model_name=", ""),
        ("served_model_name=2024-01-01", "2024-01-01"),
    ],
)
def test_strings_need_no_quotes_on_the_command_line(text: str, value: str) -> None:
    assert load(sets=[text]).served_model_name == value


def test_numbers_and_booleans_are_toml() -> None:
    settings = load(sets=["schedule.prefix_caching=false", "supervisor.stop_timeout_s=2", "gateway.port=1_000"])
    assert settings.schedule.prefix_caching is False
    assert settings.supervisor.stop_timeout_s == 2.0
    assert settings.gateway.port == 1000


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1b", 1), ("64KiB", 65536), ("512MiB", 2**29), ("1.5 GiB", 3 * 2**29), ("2TiB", 2**41), ("3mb", 3_000_000)],
)
def test_sizes_are_parsed(text: str, num_bytes: int) -> None:
    assert size_in_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1", "1 M", "1e3KiB", "1MiBs"])
def test_invalid_sizes_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        size_in_bytes(text)


def test_sizes_are_accepted_for_keys_in_bytes(write) -> None:
    assert load(write('[execute]\nkv_cache_bytes = "1GiB"\n')).execute.kv_cache_bytes == 2**30
    assert load(sets=["execute.kv_cache_bytes=2MiB"]).execute.kv_cache_bytes == 2**21
    assert load(sets=["execute.kv_cache_bytes=2097152"]).execute.kv_cache_bytes == 2**21


def test_all_errors_are_reported_at_once_with_file_key_and_expected_value(write) -> None:
    path = write(
        """
        port = 3
        modle = "x"
        gateway = 3
        [schedul]
        depth = 1
        [schedule]
        max_steps_in_flight = 5
        max_num_seqs = 10000000000000000000000
        prefix_cachin = true
        block_size = "16"
        [execute]
        kv_cache_bytes = "12 foo"
        num_threads = -1
        [supervisor]
        drain_timeout_s = inf
        stop_timeout_s = 0
        start_timeout_s = true
        """
    )
    assert problems_of(path) == [
        f"{path}: port: there is no such key; did you mean gateway.port?",
        f"{path}: modle: there is no such key; did you mean model?",
        f"{path}: gateway: is a section, written [gateway], got the number 3",
        f"{path}: there is no section [schedul]; did you mean schedule?",
        f'{path}: schedule.max_steps_in_flight: needs 0, 1, 2, 3, 4 or "auto", got the number 5',
        f"{path}: schedule.max_num_seqs: needs a whole number from 1 to 4096, got the number 10000000000000000000000",
        f"{path}: schedule.prefix_cachin: there is no such key; did you mean schedule.prefix_caching?",
        f'{path}: schedule.block_size: needs 16, got the text "16"',
        f"{path}: execute.kv_cache_bytes: needs a whole number from 0 to 1125899906842624, "
        'or a size such as "512MiB", got the text "12 foo"',
        f"{path}: execute.num_threads: needs a whole number from 0 to 4096, got the number -1",
        f"{path}: supervisor.drain_timeout_s: needs a number above 0 and at most 1000000, got the number inf",
        f"{path}: supervisor.stop_timeout_s: needs a number above 0 and at most 1000000, got the number 0",
        f"{path}: supervisor.start_timeout_s: needs a number above 0 and at most 1000000, got true",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("foo", "--set foo: needs the form section.key=value"),
        ("=3", "--set =3: needs the form section.key=value"),
        ("gateway=1", "--set gateway=1: gateway is a section; one key of it is set by gateway.key=value"),
        (
            "gateway.portt=1",
            "--set gateway.portt=1: gateway.portt: there is no such key; did you mean gateway.port?",
        ),
        ("zzzz=1", "--set zzzz=1: zzzz: there is no such key"),
        ("zz.yy=1", "--set zz.yy=1: there is no section [zz]"),
        (
            "execute.num_threads=many",
            "--set execute.num_threads=many: execute.num_threads: needs a whole number from 0 to 4096, got the text "
            '"many"',
        ),
        (
            "log_level=loud",
            '--set log_level=loud: log_level: needs "debug", "error", "info" or "warning", got the text "loud"',
        ),
        (
            "schedule.prefix_caching=1",
            "--set schedule.prefix_caching=1: schedule.prefix_caching: needs true or false, got the number 1",
        ),
    ],
)
def test_errors_on_the_command_line_name_the_option(text: str, problem: str) -> None:
    assert problems_of(sets=[text]) == [problem]


def test_errors_in_flags_name_the_flag() -> None:
    assert problems_of(flags={"gateway.port": "99999"}) == [
        "--port 99999: gateway.port: needs a whole number from 0 to 65535, got the number 99999"
    ]


def test_an_empty_model_is_rejected(write) -> None:
    path = write('model = ""\n')
    assert problems_of(path) == [f'{path}: model: needs a text that is not empty, got the text ""']


def test_an_empty_host_is_rejected_as_it_would_listen_everywhere() -> None:
    assert problems_of(flags={"gateway.host": ""}) == [
        '--host : gateway.host: needs a text that is not empty, got the text ""'
    ]


NUMBERS = [
    key for section in sections() for key in section.keys if isinstance(key.type, inspect.IntType | inspect.FloatType)
]


@pytest.mark.parametrize("key", NUMBERS, ids=lambda key: key.dotted)
def test_every_key_rejects_numbers_out_of_range(key: Key) -> None:
    for value in (str(2**63), str(2**64), "1e300", "0x" + "f" * 5000):
        (problem,) = problems_of(sets=[f"{key.dotted}={value}"])
        assert f"{key.dotted}: needs {needs(key)}, got " in problem
    if key.is_size:
        (problem,) = problems_of(sets=[f"{key.dotted}={'9' * 400}TiB"])
        assert f"{key.dotted}: needs {needs(key)}, got " in problem


def test_invalid_toml_names_the_line(write) -> None:
    path = write("model = 'a'\nport 3\n")
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}: is not valid TOML: ")
    assert "line 2" in problem


def test_a_binary_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"model = '\xff'")
    assert problems_of(path) == [f"{path}: is not UTF-8 text (byte 9)"]


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf[gateway]\nport = 7\n")
    assert load(path).gateway.port == 7


def test_deeply_nested_settings_are_rejected(write) -> None:
    path = write("model = " + "[" * 100_000)
    assert problems_of(path) == [f"{path}: is not valid settings: it is nested too deeply"]
    assert problems_of(sets=["schedule.max_steps_in_flight=" + "[" * 100_000])[0].startswith(
        "--set schedule.max_steps_in_flight=["
    )


def test_numbers_of_thousands_of_digits_are_rejected(write) -> None:
    path = write(f"max_model_len = {'9' * 5000}")
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}: is not valid TOML: ")


def test_a_name_that_is_too_long_is_rejected() -> None:
    assert problems_of(Path("x" * 300)) == [f"{'x' * 300}: can't be read: File name too long"]


def test_a_quoted_dotted_name_is_not_a_key_of_a_section(write) -> None:
    path = write('"gateway.port" = 9\n[gateway]\n"port.x" = 1\n')
    assert problems_of(path) == [
        f'{path}: "gateway.port": in quotes this is one name; write it without them',
        f'{path}: "port.x" in [gateway]: in quotes this is one name; write it without them',
    ]


def test_a_folder_is_rejected(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == [f"{tmp_path}: is not a file"]


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    os.truncate(path, 2**40)
    assert problems_of(path) == [f"{path}: is larger than 1048576 bytes, so these are no settings"]


def test_an_unknown_preset_is_an_error_that_lists_the_presets() -> None:
    (problem,) = problems_of(Path("thruput"))
    assert problem.startswith(
        "thruput: no such file, and no preset of that name; did you mean throughput? Presets are "
    )
    assert all(name in problem for name in presets())


def test_contradictions_name_the_source_of_the_key() -> None:
    problems = problems_of(sets=["max_model_len=1000000", "ingest.arena_bytes=65536"])
    assert problems == [
        "--set ingest.arena_bytes=65536: ingest.arena_bytes: needs at least 4000000 to hold the ids of one prompt of "
        "max_model_len = 1000000 tokens, got 65536",
    ]


def test_each_gateway_needs_an_open_sequence() -> None:
    assert load(sets=["gateway.replicas=4", "gateway.max_open_sequences=4"]).gateway.replicas == 4
    (problem,) = problems_of(sets=["gateway.replicas=5", "gateway.max_open_sequences=4"])
    assert problem.startswith(
        "--set gateway.replicas=5: gateway.replicas: 5 gateways share gateway.max_open_sequences = 4"
    )


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_by_its_name(name: str) -> None:
    server = load_server(Path(name))
    assert server == load_server(presets()[name])
    if name != "default":
        assert server != ServerSettings(Settings())


def test_a_file_overrides_a_preset_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "throughput").write_text("[gateway]\nport = 7\n")
    monkeypatch.chdir(tmp_path)
    assert load(Path("throughput")).gateway.port == 7


# ------------------------------------------------------------------------------------------------ old names of keys

DEPTH_WARNING = "schedule.depth is now schedule.max_steps_in_flight; the old name will be removed in the next release"


def as_table(dotted: str, value: object) -> dict[str, dict[str, object]]:
    section, _, name = dotted.partition(".")
    return {section: {name: value}}


VALUES: dict[str, object] = {
    "gateway.max_open_requests": 5,
    "gateway.allow_open": True,
    "schedule.depth": 2,
    "schedule.long_prompt_stretch": 3.5,
    "execute.early_launch": False,
    "execute.gpu_memory_fraction": 0.5,
    "execute.kv_groups": False,
    "execute.threads": 1,
    "chat.tool_format": "hermes",
    "chat.reasoning_format": "qwen3",
}


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_sets_the_new_key_and_warns_once(write, old: str) -> None:
    section, _, name = old.partition(".")
    value = VALUES[old]
    text = f'"{value}"' if isinstance(value, str) else str(value).lower()
    expected = load(sets=[f"{RENAMED[old]}={text}"])
    assert expected != Settings()
    path = write(f"[{section}]\n{name} = {text}\n")
    for given in ({"path": path}, {"sets": [f"{old}={text}"]}, {"tables": {"LLM()": as_table(old, value)}}):
        warnings: list[str] = []
        assert load(**given, warn=warnings.append) == expected
        assert warnings == [f"{old} is now {RENAMED[old]}; the old name will be removed in the next release"]


def test_an_old_name_of_a_value_sets_the_new_one_and_warns_once(write) -> None:
    path = write('[execute]\nactivations = "int16"\n')
    expected = ["execute.activations=int16 is now execute.activations=int12; the old name will be removed in the next "]
    for given in ({"path": path}, {"sets": ["execute.activations=int8", "execute.activations=int16"]}):
        warnings: list[str] = []
        assert load(**given, warn=warnings.append).execute.activations == "int12"
        assert warnings == [f"{expected[0]}release"]
    old = {"execute": {"activations": "int16", "depth": 1}, "schedule": {}}
    assert with_new_names(old)["execute"] == {"activations": "int12", "depth": 1}
    assert old["execute"]["activations"] == "int16", "the given tree is unchanged"
    assert with_new_names({"execute": {"activations": "int8"}}) == {"execute": {"activations": "int8"}}


def test_an_old_name_warns_once_though_given_twice(write) -> None:
    path = write("[schedule]\ndepth = 2\n")
    warnings: list[str] = []
    settings = load(path, ["schedule.depth=3"], warn=warnings.append)
    assert (settings.schedule.max_steps_in_flight, warnings) == (3, [DEPTH_WARNING])


def test_a_later_source_overrides_by_either_name(write) -> None:
    new, old = write("[schedule]\nmax_steps_in_flight = 2\n"), ["schedule.depth=1"]
    assert load(new, old, warn=lambda _: None).schedule.max_steps_in_flight == 1
    old_file = write("[schedule]\ndepth = 2\n")
    settings = load(old_file, ["schedule.max_steps_in_flight=1"], warn=lambda _: None)
    assert settings.schedule.max_steps_in_flight == 1


def test_both_names_in_one_source_are_an_error(write) -> None:
    path = write("[schedule]\nmax_steps_in_flight = 2\ndepth = 2\n")
    problem = "schedule.max_steps_in_flight: is set twice, also by its old name schedule.depth; remove schedule.depth"
    assert problems_of(path) == [f"{path}: {problem}"]
    sets = ["schedule.depth=1", "schedule.max_steps_in_flight=1"]
    assert problems_of(sets=sets) == [f"--set schedule.max_steps_in_flight=1: {problem}"]


def test_an_error_about_an_old_name_names_the_new_one() -> None:
    (problem,) = problems_of(sets=["execute.threads=-1"])
    assert "execute.num_threads: needs a whole number from 0 to 4096" in problem


def test_without_a_warning_handler_an_old_name_is_a_future_warning() -> None:
    with pytest.warns(FutureWarning, match=DEPTH_WARNING):
        assert load(sets=["schedule.depth=2"]).schedule.max_steps_in_flight == 2
