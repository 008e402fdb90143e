"""The command line: what it prints, where, and with which exit code."""

import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.__main__ import main
from pipeline.cli.trace.command import MARGIN_S
from pipeline.config.load import load, presets
from pipeline.config.settings import Settings
from pipeline.config.vllm_names import AS_SETTINGS, UNSUPPORTED_OPTIONS
from pipeline.runtime.tracing import MAX_WINDOW_S
from pipeline.supervisor.run_mode import RunMode
from pipeline.version import VERSION

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Returns exit code, standard output and standard error."""
    try:
        code = main(argv)
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        code = stopped.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that the supervisor is started with; it returns exit code 3."""
    settings_served: list[Settings] = []

    def serve(settings: Settings, run_mode: RunMode) -> int:
        source = run_mode.source
        assert source is not None
        assert run_mode == RunMode(source=source)
        path = Path(source.config) if source.config else None
        again = load(path, source.sets, source.flags, options=source.options, warn=lambda text: None)
        assert again == settings, "a reload reads the same"
        settings_served.append(settings)
        return 3

    supervisor = ModuleType("pipeline.supervisor.serve")
    supervisor.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pipeline.supervisor.serve", supervisor)
    return settings_served


def test_serve_passes_the_settings_to_the_supervisor_and_returns_its_code(
    served: list[Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[gateway]\nport = 1\nhost = '::1'\n")
    code, out, err = run(
        *(
            "serve",
            "--config",
            str(path),
            "--set",
            "schedule.max_steps_in_flight=2",
            "--port",
            "99",
            "--model",
            "a b.gguf",
        ),
        capsys=capsys,
    )
    assert (code, out, err) == (3, "", "")
    (settings,) = served
    assert (settings.gateway.port, settings.gateway.host) == (99, "::1")
    assert (settings.schedule.max_steps_in_flight, settings.model) == (2, "a b.gguf")


def test_serve_accepts_a_preset_by_name(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--config", "small-memory", capsys=capsys)[0] == 3
    assert served == [load(presets()["small-memory"])]


def test_invalid_settings_start_nothing(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("serve", "--port", "http", "--set", "gateway.prot=2", capsys=capsys)
    assert (code, out, served) == (2, "", [])
    assert err.splitlines() == [
        "pipeline: error: --set gateway.prot=2: gateway.prot: there is no such key; did you mean gateway.port?",
        'pipeline: error: --port http: gateway.port: needs a whole number from 0 to 65535, got the text "http"',
    ]


def test_options_without_effect_cause_a_warning(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("serve", "--set", "schedule.max_num_batched_tokens=16", capsys=capsys)
    assert code == 3
    assert err.startswith("pipeline: warning: schedule.max_num_seqs: ")


def test_an_interrupt_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(settings: Settings, run_mode: RunMode) -> int:
        raise KeyboardInterrupt

    supervisor = ModuleType("pipeline.supervisor.serve")
    supervisor.serve = interrupted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pipeline.supervisor.serve", supervisor)
    assert run("serve", capsys=capsys) == (130, "", "")


def test_an_unavailable_address_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken(settings: Settings, run_mode: RunMode) -> int:
        raise OSError("cannot listen on 127.0.0.1:8000: Address already in use; choose another gateway.port")

    supervisor = ModuleType("pipeline.supervisor.serve")
    supervisor.serve = taken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pipeline.supervisor.serve", supervisor)
    words = "cannot listen on 127.0.0.1:8000: Address already in use; choose another gateway.port"
    assert run("serve", capsys=capsys) == (2, "", f"pipeline: error: {words}\n")


def test_config_show_prints_the_effective_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("config", "show", "--config", "exact", "--set", "gateway.port=7", capsys=capsys)
    assert (code, err) == (0, "")
    assert tomllib.loads(out)["gateway"]["port"] == 7
    path = tmp_path / "shown.toml"
    path.write_text(out)
    assert load(path) == load(Path("exact"), ["gateway.port=7"])


def test_config_check_prints_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[gateway]\nport = 1\n")
    assert run("config", "check", str(path), capsys=capsys) == (0, f"{path}: ok\n", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = " + "[" * 100_000, "nested too deeply"),
        ("[schedule]\nmax_num_batched_tokens = 99999999999999999999", "needs a whole number from 16 to 1048576"),
        ('"gateway.port" = 9', "in quotes this is one name"),
    ],
)
def test_config_check_reports_every_unreadable_file(
    tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    code, out, err = run("config", "check", str(path), capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_config_check_reports_an_invalid_file_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("config", "check", "x" * 300, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "File name too long" in err


def test_config_check_reports_every_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[gateway]\nport = 'x'\nhosst = ''\n")
    code, out, err = run("config", "check", str(path), capsys=capsys)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f'pipeline: error: {path}: gateway.port: needs a whole number from 0 to 65535, got the text "x"',
        f"pipeline: error: {path}: gateway.hosst: there is no such key; did you mean gateway.host?",
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sreve"], "invalid choice: 'sreve'; did you mean serve? (choose from serve, deploy, chat,"),
        (["xyzzy"], "invalid choice: 'xyzzy' (choose from serve, deploy, chat,"),
        (
            ["run", "llama3"],
            "invalid choice: 'run'; use `pipeline serve MODEL`, then `pipeline chat` in another terminal",
        ),
        (["pull", "llama3"], "'pull'; use `pipeline serve MODEL`, which downloads and prepares the model (see"),
        (["rm", "llama3"], "'rm'; use `pipeline cache rm NAME` (see"),
        (["serve", "--ctx-size", "4096"], "unrecognized arguments: --ctx-size; use --max-model-len N (see pipeline"),
        (["serve", "-m", "a", "-c", "9"], "arguments: -m -c 9; -m: use --model MODEL; -c: use --max-model-len N (see"),
        (["serve", "--cache-dir", "/x"], "arguments: --cache-dir; use --set cache_dir=VALUE (see pipeline serve"),
        (["serve", "--num_threads=2"], "use --set execute.num_threads=VALUE (see pipeline serve"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot; did you mean --port? (see pipeline serve"),
        (
            ["serve", "--modle=x"],
            "unrecognized arguments: --modle=x; did you mean --model? (see pipeline serve --help)",
        ),
        (["serve", "a", "b"], "unrecognized arguments: b (see pipeline serve --help)"),
        (["serve", "m", "--served-model-name", "a", "b"], "arguments: b; --served-model-name takes one name (see"),
        (["serve", "m", "--served-model-name=a", "b"], "arguments: b; --served-model-name takes one name (see"),
        (["config", "show", "--x"], "unrecognized arguments: --x (see pipeline config show --help)"),
        (["--x", "serve"], "unrecognized arguments: --x (see pipeline --help)"),
        (["profile", "execute", "--max-model-len", "9"], "did you mean --set max_model_len=N?"),
        (["serve", "--seed", "1"], "--seed of vLLM is not supported: set `seed` in each request"),
        (
            ["serve", "--data_parallel_size=2"],
            "--data-parallel-size of vLLM is not supported: leave it out, and start several servers",
        ),
        (["serve", "--trust-remote-code"], "leave it out: no code of a checkpoint is ever run (see pipeline serve"),
        (["serve", "--dtype", "half"], "argument --dtype: half is not supported: use bfloat16 or float32"),
        (["serve", "--kv-cache-dtype", "fp8"], "argument --kv-cache-dtype: fp8 is not supported: use int8"),
        (["serve", "--max-num-seqs", "many"], "argument --max-num-seqs: needs a number such as 4096 or 4K, got 'many'"),
        (["serve", "--port"], "argument --port: expected one argument"),
        (["config"], "the following arguments are required: ACTION"),
        (["config", "check"], "the following arguments are required: FILE"),
    ],
)
def test_mistyped_commands_are_errors_of_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(*argv, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("pipeline: error: ")
    assert words in err
    assert "--help" in err


def test_serve_accepts_the_model_as_a_positional_argument(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", "ORG/NAME", "--port", "1", capsys=capsys) == (3, "", "")
    assert [one.model for one in served] == ["ORG/NAME"]
    code, _, err = run("serve", "ORG/NAME", "--model", "x", capsys=capsys)
    assert (code, err) == (2, "pipeline: error: the model is given twice: ORG/NAME, and --model x\n")


VLLM_OPTIONS = {
    "--allow-credentials": ("gateway.allow_credentials", True),
    '--allowed-headers=["x-a"]': ("gateway.allowed_headers", ("x-a",)),
    '--allowed-methods=["GET", "POST"]': ("gateway.allowed_methods", ("GET", "POST")),
    '--allowed-origins=["*"]': ("gateway.allowed_origins", ("*",)),
    "--api-server-count=2": ("gateway.replicas", 2),
    "--async-scheduling": ("schedule.max_steps_in_flight", 2),
    "--device=cuda": ("execute.device", "cuda"),
    "--download-dir=/a": ("cache_dir", "/a"),
    "--dtype=float": ("execute.dtype", "float32"),
    "--disable-hybrid-kv-cache-manager": ("execute.hybrid_kv_cache_manager", False),
    "--enable-prefix-caching": ("schedule.prefix_caching", True),
    "--enable-per-request-metrics": ("gateway.per_request_metrics", True),
    '--hf-overrides={"rope_theta": 1e6}': ("hf_overrides", '{"rope_theta": 1e6}'),
    "--chat-template=chatml.jinja": ("chat_template", "chatml.jinja"),
    "--generation-config=folder": ("generation_config", "folder"),
    "--generation-config=vllm": ("generation_config", "none"),
    "--gpu-memory-utilization=0.5": ("execute.gpu_memory_utilization", 0.5),
    "--kv-cache-dtype=auto": ("execute.kv_dtype", "auto"),
    "--kv-cache-dtype=int8": ("execute.kv_dtype", "int8"),
    "--kv-cache-dtype=int8_per_token_head": ("execute.kv_dtype", "int8"),
    "--kv-cache-memory-bytes=1G": ("execute.kv_cache_bytes", 2**30),
    "--long-prefill-token-threshold=7": ("schedule.long_prompt_tokens", 7),
    "--lora-modules=sql=/a": ("lora.adapters", {"sql": "/a"}),
    '--lora-modules={"name": "a b", "path": "/x", "base_model_name": null}': ("lora.adapters", {"a b": "/x"}),
    "--max-cpu-loras=9": ("lora.max_cpu_loras", 9),
    "--max-lora-rank=8": ("lora.max_lora_rank", 8),
    "--max-loras=3": ("lora.max_loras", 3),
    "--max-logprobs=5": ("limits.max_logprobs", 5),
    "--max-model-len=4k": ("max_model_len", 4000),
    "--max-num-batched-tokens=1K": ("schedule.max_num_batched_tokens", 1024),
    "--max-num-queued-reqs=64": ("gateway.max_open_sequences", 64),
    "--max_num_seqs=3": ("schedule.max_num_seqs", 3),
    "--no-async-scheduling": ("schedule.max_steps_in_flight", 1),
    "--no-enable-prefix-caching": ("schedule.prefix_caching", False),
    "--quantization=q8_0": ("quantization", "q8_0"),
    "--reasoning-parser=qwen3": ("chat.reasoning_parser", "qwen3"),
    "--scheduling-policy=priority": ("schedule.policy", "priority"),
    "--served-model-name=mine": ("served_model_name", "mine"),
    "--ssl-ca-certs=ca.pem --ssl-certfile=a.pem": ("gateway.ssl_ca_certs", "ca.pem"),
    "--ssl-certfile=a.pem": ("gateway.ssl_certfile", "a.pem"),
    "--ssl-keyfile=a.key --ssl-certfile=a.pem": ("gateway.ssl_keyfile", "a.key"),
    "--kv-offloading-size=0.25": ("execute.swap_bytes", 2**28),
    "--swap-space=0.5": ("execute.swap_bytes", 2**29),
    "--tensor-parallel-size=2": ("execute.tensor_parallel", 2),
    "--tp=3": ("execute.tensor_parallel", 3),
    "--pipeline-parallel-size=2": ("execute.pipeline_parallel", 2),
    "--pp=3": ("execute.pipeline_parallel", 3),
    "--tool-call-parser=llama3_json": ("chat.tool_call_parser", "llama3"),
    "--uvicorn-log-level=warning": ("log_level", "warning"),
}


def value_of(settings: Settings, dotted: str) -> object:
    found: object = settings
    for name in dotted.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("options", "setting"), VLLM_OPTIONS.items())
def test_serve_accepts_vllm_s_options(
    options: str, setting: tuple[str, object], served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run("serve", *options.replace(" --", "\n--").split("\n"), "MODEL", capsys=capsys)
    assert (code, "error" in err) == (3, False), err
    assert value_of(served[0], setting[0]) == setting[1]
    assert served[0].model == "MODEL"


def test_every_vllm_option_is_tried_and_arguments_that_change_nothing_are_accepted(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    tried = {option.partition("=")[0].replace("_", "-") for option in VLLM_OPTIONS}
    assert tried == set(AS_SETTINGS)
    ignored = [
        f"{flag}={value}" for flag, refused in UNSUPPORTED_OPTIONS.items() for value in refused.ignored_arguments
    ]
    assert len(ignored) > 5
    assert run("serve", *ignored, capsys=capsys) == (3, "", "")
    assert served == [Settings()]


def test_a_second_served_name_is_not_taken_for_the_model(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run("serve", "--model", "m", "--served-model-name", "a", "b", capsys=capsys)
    assert (code, served) == (2, [])
    assert "the model is given twice: b, and --model m; --served-model-name takes one name" in err


def test_a_share_of_gpu_memory_is_a_warning_on_a_cpu(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    for share in ("0.5", "0.9"):  # also the default
        _, _, err = run("serve", "--gpu-memory-utilization", share, capsys=capsys)
        assert err.startswith("pipeline: warning: ") and "gpu" in err and "no effect" in err and err.count("\n") == 1
    assert "no effect" not in run("serve", "--gpu-memory-utilization", "0.9", "--device", "cuda", capsys=capsys)[2]
    assert "no effect" not in run("serve", capsys=capsys)[2]


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("usage: pipeline") and "serve a model over HTTP" in err


def test_a_wrong_value_names_the_option(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("serve", "--quantization", "awq", "--max-logprobs", "9999", capsys=capsys)
    assert (code, served) == (2, [])
    assert "pipeline: error: --quantization awq: quantization: needs " in err
    assert "pipeline: error: --max-logprobs 9999: limits.max_logprobs: needs a whole number from 0 to 1024" in err


def test_api_key_is_used_like_the_variable_and_leaves_the_command_line(tmp_path: Path) -> None:
    code = (
        "import os, sys, types, pathlib; from pipeline import __main__; m = types.ModuleType('serve');\n"
        "def serve(settings, run_mode):\n"
        "    print(os.environ['PIPELINE_API_KEYS'].split(), pathlib.Path('/proc/self/cmdline').read_bytes())\n"
        "m.serve = serve; sys.modules['pipeline.supervisor.serve'] = m\n"
        "__main__.main(['serve', *sys.argv[1:]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--api-key", "first-secret", "--api-key=second-secret"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PIPELINE_API_KEYS": "third-secret"},
    )
    keys, _, line = done.stdout.partition("]")
    assert keys == "['third-secret', 'first-secret', 'second-secret'", done.stderr
    assert "secret" not in line and "pipeline serve" in line
    assert "warning: --api-key: other users could see the key" in done.stderr


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([","], "--api-key: contains no key"),
        (["good-key", "secret key"], "--api-key, entry 2: a key must have 1 to 512"),
    ],
)
def test_an_error_of_api_key_names_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keys: list[str], words: str
) -> None:
    monkeypatch.setattr("setproctitle.setproctitle", lambda title: None)
    monkeypatch.delenv("PIPELINE_API_KEYS", raising=False)
    code, _, err = run("serve", *(f"--api-key={key}" for key in keys), capsys=capsys)
    assert code == 2 and words in err and "PIPELINE_API_KEYS" not in err and "secret" not in err


def test_no_limit_of_logprobs_is_refused_with_the_largest_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("serve", "--max-logprobs=-1", capsys=capsys)
    assert code == 2 and "argument --max-logprobs: -1, vLLM's 'no limit', is not supported: use 0 to 1024" in err


def test_the_help_of_trace_has_the_longest_time(capsys: pytest.CaptureFixture[str]) -> None:
    longest_s = MAX_WINDOW_S - MARGIN_S
    _, out, _ = run("trace", "--help", capsys=capsys)
    assert f"at most {longest_s:g}" in " ".join(out.split())
    code, _, err = run("trace", f"--seconds={longest_s + 1}", capsys=capsys)
    assert code == 1 and f"at most {longest_s:g}" in err


def test_the_equivalent_of_each_vllm_option_is_a_setting() -> None:
    docs = (ROOT / "docs" / "http.md").read_text("utf-8")
    for flag in UNSUPPORTED_OPTIONS:
        assert f"`{flag}`" in docs
    for flag, setting in AS_SETTINGS.items():
        assert f"| `{flag}` | `{setting}` |" in docs
        section: object = Settings()
        for name in setting.partition("=")[0].split("."):
            section = getattr(section, name)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version", capsys=capsys) == (0, f"pipeline {VERSION}\n", "")


@pytest.mark.parametrize("command", [[], ["serve"], ["bench"], ["config"], ["config", "show"], ["config", "check"]])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*command, "--help", capsys=capsys)
    assert (code, err) == (0, "")
    assert out.startswith(" ".join(["usage: pipeline", *command]))


def module(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_it_runs_as_a_module_with_clean_errors() -> None:
    done = module("config", "check", "no-such.toml")
    assert done.returncode == 2
    assert done.stderr.startswith("pipeline: error: no-such.toml: no such file")
    assert "Traceback" not in done.stderr


def test_help_is_fast() -> None:
    """Measured as CPU time, relative to a start that imports one library: other load affects both."""

    def cpu_s(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(cpu_s("-m", "pipeline", "--help"), cpu_s("-c", "import msgspec, argparse")) for _ in range(5)]
    help_s, least_s = map(min, zip(*pairs, strict=True))
    assert help_s < 3 * least_s, "numpy alone would double it"


@pytest.mark.parametrize("words", [("config", "show"), ("models", "--supported")])
def test_a_full_disk_behind_the_output_is_one_line(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *words], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, b"pipeline: error: no space is left for the output\n")


def test_a_closed_pipe_ends_it_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", "config", "show"],
            cwd=ROOT,
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (1, b"")
