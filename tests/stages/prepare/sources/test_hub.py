"""Hub ids: the needed files of a commit, from a hub or from its cache, and errors of one line."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.sources.source import HubSource
from tests.stages.prepare import checkpoints, preparing
from tests.stages.prepare.fake_hub import COMMIT, OTHER_COMMIT, FakeHub, Repo
from tests.stages.prepare.test_architectures import IDS, expected, logits

ROOT = Path(__file__).parents[4]


class Machine:
    """A user's machine with its own caches."""

    def __init__(self, home: Path, endpoint: str) -> None:
        self.home = home
        self.environment = {
            **{
                key: value
                for key, value in os.environ.items()
                if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))
            },
            "HF_HOME": str(home / "hf"),
            "HF_ENDPOINT": endpoint,
            "NO_PROXY": "*",
        }

    def run(self, model: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return preparing.run(model, self.home / "cache", self.environment | environment, self.home)

    def prepare(self, model: str, **environment: str) -> Path:
        result = self.run(model, **environment)
        assert result.returncode == 0, result.stderr
        self.log = result.stderr
        return Path(result.stdout.strip())

    def fail(self, model: str, **environment: str) -> str:
        """The error message for the user."""
        result = self.run(model, **environment)
        assert result.returncode == 1, result.stdout
        *_, line = result.stderr.strip().splitlines()
        assert "Traceback" not in result.stderr
        assert line.startswith("error: ")
        return line


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny Qwen2 in three shards, with the other files that repositories have."""
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    checkpoints.save_folder(folder, checkpoints.tiny("qwen2", tie_word_embeddings=True), shard_size="200KB")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len([name for name in files if name.endswith(".safetensors")]) > 1
    extra = dict.fromkeys(("README.md", "pytorch_model.bin", "consolidated.safetensors"), b"not to be fetched")
    return {**files, **extra, "onnx/config.json": b"{}", "original/params.json": b"{}", ".gitattributes": b""}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    hub = FakeHub()
    hub.repos["org/tiny"] = Repo({COMMIT: dict(files)})
    yield hub
    hub.close()


@pytest.fixture
def machine(tmp_path: Path, hub: FakeHub) -> Machine:
    return Machine(tmp_path, hub.url)


def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_hub_model_is_fetched_once_and_served_from_the_hubs_cache(
    machine: Machine, hub: FakeHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    folder = machine.prepare("org/tiny")
    config = ModelConfig.load(folder)
    assert (config.name, config.architecture) == ("org/tiny", "qwen2")
    snapshot = tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert {path.parent for path in config.weight_paths(folder)} == {snapshot}
    weights = {name for name in files if name.startswith("model-") and name.endswith(".safetensors")}
    configs = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert hub.fetched() == {*weights, *configs, "model.safetensors.index.json"} & set(files)
    num_bytes = sum(len(files[name]) for name in hub.fetched() - {"model.safetensors.index.json"})
    assert f"downloading org/tiny at {COMMIT[:12]}\n" in machine.log
    assert f"downloading org/tiny at {COMMIT[:12]}: done, {num_bytes / 1e6:.1f} MB" in machine.log

    theirs = AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32).eval()
    np.testing.assert_allclose(logits(folder, IDS), expected(theirs, IDS), rtol=0, atol=1e-4)

    hub.requests.clear()
    assert machine.prepare("org/tiny") == folder
    assert hub.requests == []
    assert "downloading" not in machine.log
    assert "huggingface_hub" not in (tmp_path / "modules").read_text().splitlines()  # its import takes 0.2 s


def test_the_modules_of_sentence_transformers_are_fetched(
    machine: Machine, hub: FakeHub, files: dict[str, bytes]
) -> None:
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Normalize")]
    for module, path in zip(modules, ("", "1_Pooling", "2_Normalize"), strict=True):
        module["path"] = path
    more = {
        "modules.json": json.dumps(modules).encode(),
        "1_Pooling/config.json": b'{"pooling_mode": "lasttoken"}',
        "3_Other/config.json": b"{}",
    }
    hub.repos["org/tiny"] = Repo({COMMIT: {**files, **more}})
    pooler = ModelConfig.load(machine.prepare("org/tiny")).pooler
    assert pooler is not None and pooler.pooling == "last"
    assert more.keys() & hub.fetched() == {"modules.json", "1_Pooling/config.json"}
    # A copy without them, as of a version that read no modules, is completed.
    (config,) = machine.home.glob("hf/hub/models--org--tiny/snapshots/*/1_Pooling/config.json")
    config.unlink()
    assert machine.prepare(f"org/tiny@{COMMIT}") and config.is_file()


def test_one_file_of_weights_is_fetched_rather_than_the_shards_beside_it() -> None:
    """As transformers does."""
    from pipeline.stages.prepare.sources.hub.fetch import (
        _wanted,
    )  # huggingface_hub: the other tests import it elsewhere

    names = ["config.json", "model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors"]
    found = _wanted(HubSource("org/tiny", "main"), names, Path)
    assert [name for name in found if name.endswith(".safetensors")] == ["model.safetensors"]


def test_of_a_model_that_is_not_supported_no_weights_are_fetched(
    machine: Machine, hub: FakeHub, files: dict[str, bytes]
) -> None:
    other = json.loads(files["config.json"]) | {"model_type": "wonderformer"}
    hub.repos["org/tiny"].commits[COMMIT]["config.json"] = json.dumps(other).encode()
    line = machine.fail("org/tiny")
    assert line.endswith(
        "config.json: model_type is 'wonderformer', which is not supported; `pipeline models "
        "--supported` lists those that are"
    )
    assert hub.fetched() == {"config.json", "model.safetensors.index.json"}


def test_a_moved_branch_is_not_followed_by_a_start_and_entries_are_kept_by_commit(
    machine: Machine, hub: FakeHub, files: dict[str, bytes]
) -> None:
    first = machine.prepare("org/tiny")
    changed = {**files, "generation_config.json": json.dumps({"eos_token_id": [2, 7]}).encode()}
    hub.repos["org/tiny"].commits[OTHER_COMMIT] = changed
    hub.repos["org/tiny"].refs |= {"main": OTHER_COMMIT, "v1": COMMIT, "refs/pr/3": OTHER_COMMIT}
    assert machine.prepare("org/tiny") == first
    (machine.home / "hf/hub/models--org--tiny/refs/main").unlink()  # `pipeline pull` looks for a newer commit
    second = machine.prepare("org/tiny")
    assert second != first
    assert ModelConfig.load(second).eos_ids == [2, 7]
    assert machine.prepare("org/tiny@v1") == first
    assert machine.prepare("org/tiny@refs/pr/3") == second
    # A commit that is cached needs no request.
    hub.requests.clear()
    assert machine.prepare(f"org/tiny@{COMMIT}") == first
    assert hub.requests == []


def test_the_revision_can_be_a_commit(machine: Machine) -> None:
    folder = machine.prepare(f"org/tiny@{COMMIT}")
    assert machine.prepare(f"org/tiny@{COMMIT}", HF_HUB_OFFLINE="1") == folder


def test_without_a_network_the_last_copy_is_used(machine: Machine, hub: FakeHub) -> None:
    folder = machine.prepare("org/tiny")
    hub.requests.clear()
    assert machine.prepare("org/tiny", HF_HUB_OFFLINE="1") == folder
    assert hub.requests == []
    assert machine.prepare("org/tiny", HF_ENDPOINT=closed_port()) == folder
    hub.status = 503
    assert machine.prepare("org/tiny") == folder


def test_a_cache_filled_by_other_tools_works_offline(machine: Machine, files: dict[str, bytes], tmp_path: Path) -> None:
    """As `hf download` of any version writes it."""
    storage = tmp_path / "hf" / "hub" / "models--other--tiny"
    snapshot = storage / "snapshots" / OTHER_COMMIT
    snapshot.mkdir(parents=True)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(OTHER_COMMIT)
    for name, data in files.items():
        if "/" not in name:
            (snapshot / name).write_bytes(data)
    folder = machine.prepare("other/tiny", HF_HUB_OFFLINE="1")
    assert ModelConfig.load(folder).weight_paths(folder)[0].parent == snapshot
    shard = next(snapshot.glob("model-*.safetensors"))
    shard.unlink()
    assert "other/tiny is not in" in (line := machine.fail("other/tiny", HF_HUB_OFFLINE="1"))
    assert "in part" in line and "download it once while online" in line


def test_an_interrupted_download_is_resumed(machine: Machine, hub: FakeHub) -> None:
    hub.cut_after = 50_000
    machine.prepare("org/tiny")
    assert hub.cut_after == 0


def test_a_token_is_sent_if_one_is_needed(machine: Machine, hub: FakeHub) -> None:
    hub.repos["org/tiny"].gated = True
    line = machine.fail("org/tiny")
    assert f"org/tiny is gated: accept its terms at {hub.url}/org/tiny" in line and "(no token is set)" in line
    assert "the current token has no access" in machine.fail("org/tiny", HF_TOKEN="hf_poor")
    assert f"{hub.url} refused the token in HF_TOKEN for org/tiny (401)" in machine.fail("org/tiny", HF_TOKEN="hf_bad")
    machine.prepare("org/tiny", HF_TOKEN=hub.token)
    hub.repos["org/private"] = Repo(hub.repos["org/tiny"].commits, private=True)
    assert "has no model org/private, or it is private" in machine.fail("org/private")
    machine.prepare("org/private", HF_TOKEN=hub.token)


def test_the_error_for_a_missing_model_names_it(machine: Machine, hub: FakeHub) -> None:
    assert f"{hub.url} has no model org/none, or it is private: check the name" in machine.fail("org/none")
    assert "org/tiny has no revision 'v9'" in machine.fail("org/tiny@v9")
    assert f"org/tiny@{OTHER_COMMIT} " not in machine.fail(f"org/tiny@{OTHER_COMMIT}")
    assert "model or--g/ti..ny: " in machine.fail("or--g/ti..ny")
    port = closed_port()
    line = machine.fail("org/tiny", HF_ENDPOINT=port)
    assert f"cannot download org/tiny: {port} is not reachable" in line
    assert "use a folder or a .gguf file as model" in line
    line = machine.fail("org/tiny", HF_HUB_OFFLINE="1")
    assert f"HF_HUB_OFFLINE or --offline is set, and org/tiny is not in {machine.home / 'hf' / 'hub'}" in line
    hub.status = 500
    assert "returned an error for org/tiny" in machine.fail("org/tiny")


def test_the_password_of_a_mirror_is_in_no_line(machine: Machine) -> None:
    line = machine.fail("org/tiny", HF_ENDPOINT=closed_port().replace("//", "//user:5ec4e7@"))
    assert "//***@127.0.0.1" in line and "5ec4e7" not in line


REPOSITORIES: dict[str, tuple[Callable[[str], bool], str]] = {
    "no config": (lambda name: name != "config.json", r"has no config.json"),
    "pickles": (
        lambda name: not name.endswith(("safetensors", "index.json")),
        "It has pytorch_model.bin: save the model again",
    ),
    "another layout": (
        lambda name: name in ("config.json", "tokenizer.json", "consolidated.safetensors"),
        "It has consolidated.safetensors: it may be an adapter, or weights in another layout",
    ),
    "a shard is lost": (lambda name: "-00002-" not in name, "names model-00002-of-"),
}


@pytest.mark.parametrize("how", REPOSITORIES)
def test_a_repository_without_a_supported_model_is_reported_before_large_downloads(
    machine: Machine, hub: FakeHub, files: dict[str, bytes], how: str
) -> None:
    keeps, words = REPOSITORIES[how]
    hub.repos["org/odd"] = Repo({COMMIT: {name: data for name, data in files.items() if keeps(name)}})
    assert words in machine.fail("org/odd")
    assert not any("/blobs/" in path for _, path in hub.requests)


def test_a_cache_that_is_not_writable_is_reported(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = machine.fail("org/tiny", HF_HOME=str(tmp_path / "file" / "hf"))
    assert "set HF_HOME" in line


def test_a_hub_id_can_be_checked(machine: Machine) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pipeline", "check-model", f"org/tiny@{COMMIT}", "--tokens", "64"),
            *("--kernels", "torch", "--set", "execute.num_threads=1", "--set", f"cache_dir={machine.home / 'cache'}"),
        ],
        cwd=ROOT,
        env=machine.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "passed: 5 checks" in result.stdout
