"""Architectures of installed packages: that of docs/adding_a_model.md has the logits of transformers, and broken ones
are named."""

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.model import foreign
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.architectures import find_architecture
from pipeline.stages.prepare.check_model import random_checkpoint
from pipeline.stages.prepare.check_model.reference import Reference
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.tiny_architectures import SIZES, Variant, make
from tests.stages.prepare import checkpoints

DOCS = Path(__file__).parents[3] / "docs" / "adding_a_model.md"
IDS = np.random.default_rng(0).integers(3, 600, 50).tolist()
BUILD = """
from pipeline.stages.execute.models import decoder

calls = []

def build(config, weights, program, part):
    calls.append(config.architecture)
    decoder.build(config, weights, program, part)
"""


def files_of_docs() -> dict[str, str]:
    """The files of the package, by name."""
    _, _, section = DOCS.read_text().partition("\n## An architecture in a package of its own\n")
    section, _, _ = section.partition("\n## ")
    return dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```", section, re.MULTILINE | re.DOTALL))


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Writes the files of a package to a folder of modules, as pip would."""
    root = tmp_path / "site-packages"
    names: list[str] = []

    def write(files: dict[str, str]) -> None:
        project = tomllib.loads(files["pyproject.toml"])["project"]
        points = "".join(f"{key} = {value}\n" for key, value in project["entry-points"][foreign.GROUP].items())
        info = f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        found = {name: text for name, text in files.items() if name != "pyproject.toml"}
        found[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        found[f"{info}/entry_points.txt"] = f"[{foreign.GROUP}]\n{points}"
        for name, text in found.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            names.append(name.partition("/")[0].removesuffix(".py"))
        importlib.invalidate_caches()
        foreign.find.cache_clear()

    monkeypatch.syspath_prepend(root)
    yield write
    for name in [one for one in sys.modules if one.partition(".")[0] in names]:
        del sys.modules[name]
    foreign.find.cache_clear()


def package(point: str, name: str = "pipeline-cwm", code: str = "") -> dict[str, str]:
    """The files of a package with one entry point."""
    lines = f'[project]\nname = "{name}"\nversion = "1.0"\n[project.entry-points."pipeline.models"]\ncwm = "{point}"\n'
    return {"pyproject.toml": lines, f"{name.replace('-', '_')}.py": code}


def saved(folder: Path) -> tuple[Path, torch.nn.Module]:
    sizes = {**SIZES, "num_hidden_layers": 5, "head_dim": 32, "sliding_window": 21}
    model = make(Variant("cwm", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, sizes))
    return checkpoints.save_folder(folder / "source", model), model


def prepared(source: Path, folder: Path) -> Path:
    return prepare(Settings(model=str(source), cache_dir=str(folder / "cache")))


def test_the_package_of_the_docs_has_the_logits_of_transformers(tmp_path: Path, install: Install) -> None:
    source, model = saved(tmp_path)
    with pytest.raises(ModelError, match="model_type is 'cwm', which is not supported"):
        prepared(source, tmp_path)
    files = files_of_docs()
    assert files.keys() == {"pyproject.toml", "pipeline_cwm/__init__.py", "pipeline_cwm/config.py"}
    install(files)
    config = json.loads((source / "config.json").read_text())
    for changed in (config, {key: value for key, value in config.items() if key != "layer_types"}):
        (source / "config.json").write_text(json.dumps(changed))
        folder = prepared(source, tmp_path)
        made = ModelConfig.load(folder)
        assert (made.architecture, made.sliding_window, made.sliding_layers) == ("cwm", 21, [1, 2, 3])
    driver = Driver(folder, settings(kernels="torch", tokens=64, kv_mib=2))
    driver.step([(0, 0, len(IDS), True)], adds=[row_add(0, IDS, driver.take_blocks(len(IDS)))])
    with torch.inference_mode():
        theirs = model(torch.tensor([IDS])).logits[0, -1].numpy()
    np.testing.assert_allclose(driver.logits()[0], theirs, rtol=0, atol=1e-4)


def test_a_package_may_have_a_builder_of_its_own(tmp_path: Path, install: Install) -> None:
    files = files_of_docs() | {"pipeline_cwm/build.py": BUILD}
    files["pipeline_cwm/__init__.py"] = files["pipeline_cwm/__init__.py"].replace(
        ":CWM", ':CWM", build="pipeline_cwm.build:build'
    )
    install(files)
    source, _ = saved(tmp_path)
    Driver(prepared(source, tmp_path), settings(kernels="torch", tokens=64, kv_mib=2))
    assert sys.modules["pipeline_cwm.build"].calls == ["cwm"]


REFERENCE = """
calls = []

def register():
    calls.append("registered")
"""


@pytest.mark.parametrize("what", ["a config", "a checkpoint"])
def test_its_classes_are_registered_before_transformers_loads_the_model(
    tmp_path: Path, install: Install, what: str
) -> None:
    files = files_of_docs() | {"pipeline_cwm/reference.py": REFERENCE}
    files["pipeline_cwm/__init__.py"] = files["pipeline_cwm/__init__.py"].replace(
        ":CWM", ':CWM", reference="pipeline_cwm.reference:register'
    )
    install(files)
    source, _ = saved(tmp_path)
    if what == "a config":
        random_checkpoint.make(source / "config.json", tmp_path, seed=0)
    else:
        Reference(source)
    assert sys.modules["pipeline_cwm.reference"].calls == ["registered"]


def test_a_prepared_model_whose_package_is_gone(tmp_path: Path, install: Install) -> None:
    install(files_of_docs())
    source, _ = saved(tmp_path)
    folder = prepared(source, tmp_path)
    for path in (tmp_path / "site-packages").glob("*.dist-info/*"):
        path.unlink()
    importlib.invalidate_caches()
    foreign.find.cache_clear()
    with pytest.raises(UserError, match="has the architecture 'cwm', but no installed package has it any more"):
        Driver(folder, settings(kernels="torch", tokens=64, kv_mib=2))


@pytest.mark.parametrize(
    ("point", "code", "words"),
    [
        ("pipeline_cwm:MODEL", "MODEL = 1", "entry point cwm = pipeline_cwm:MODEL of pipeline-cwm is no ForeignModel"),
        (
            "pipeline_cwm:MODEL",
            "import nothing_of_this_name",
            "can't be imported: ModuleNotFoundError: No module named",
        ),
        ("pipeline_cwm:OTHER", "", "can't be imported: AttributeError"),
        (
            "pipeline_cwm:MODEL",
            "from pipeline.runtime.model.foreign import ForeignModel\nMODEL = ForeignModel('pipeline_cwm:MODEL')",
            "pipeline_cwm:MODEL of model_type 'cwm' is no HfArchitecture",
        ),
    ],
)
def test_a_broken_package_is_named(install: Install, point: str, code: str, words: str) -> None:
    install(package(point, code=code))
    with pytest.raises(UserError, match=re.escape(words)):
        find_architecture("cwm")


WINDOWS = "def windows(config, num_layers):\n    "


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (WINDOWS, f"{WINDOWS}raise KeyError('boom')\n    ", "failed: KeyError: 'boom' (config.py:6)"),
        (WINDOWS, f"{WINDOWS}raise SystemExit(3)\n    ", "failed: SystemExit: 3 (config.py:6)"),
        (WINDOWS, f"{WINDOWS}return None\n    ", "failed: TypeError: cannot unpack non-iterable NoneType object"),
        (
            "windows=windows,",
            "fields=lambda keys, model: 1 / 0,",
            "failed: ZeroDivisionError: division by zero (config.py",
        ),
        (
            "windows=windows,",
            "fields=lambda keys, model: {'no_field': 1},",
            "failed: TypeError: `ModelConfig` has no field",
        ),
        (
            "windows=windows,",
            "fields=lambda keys, model: {'activation': 'none'},",
            "failed: ValidationError: Invalid enum value 'none' - at `$.activation`",
        ),
        ("windows=windows,", "layout=lambda model: [][1],", "failed: IndexError: list index out of range (config.py"),
    ],
    ids=str,
)
def test_what_a_package_raises_names_it(tmp_path: Path, install: Install, old: str, new: str, words: str) -> None:
    files = files_of_docs()
    assert old in files["pipeline_cwm/config.py"]
    install(files | {"pipeline_cwm/config.py": files["pipeline_cwm/config.py"].replace(old, new)})
    source, _ = saved(tmp_path)
    with pytest.raises(UserError, match=re.escape(words)) as raised:
        prepared(source, tmp_path)
    assert str(raised.value).startswith("pipeline_cwm.config:CWM of model_type 'cwm' failed")


def test_a_package_that_ends_the_process_while_it_is_imported(install: Install) -> None:
    install(package("pipeline_cwm:MODEL", code="raise SystemExit(3)"))
    with pytest.raises(UserError, match=r"can't be imported: SystemExit: 3 \(pipeline_cwm.py:1\)"):
        find_architecture("cwm")


def test_a_builder_that_raises(tmp_path: Path, install: Install) -> None:
    files = files_of_docs() | {"pipeline_cwm/build.py": "def build(*given):\n    raise RuntimeError('not yet')\n"}
    files["pipeline_cwm/__init__.py"] = files["pipeline_cwm/__init__.py"].replace(
        ":CWM", ':CWM", build="pipeline_cwm.build:build'
    )
    install(files)
    source, _ = saved(tmp_path)
    folder = prepared(source, tmp_path)
    words = r"the builder of model_type 'cwm' failed: RuntimeError: not yet \(build.py:2\)"
    with pytest.raises(UserError, match=words):
        Driver(folder, settings(kernels="torch", tokens=64, kv_mib=2))


def test_two_packages_with_the_same_architecture_are_named(install: Install) -> None:
    for name in ("pipeline-one", "pipeline-two"):
        install(package(f"{name.replace('-', '_')}:MODEL", name))
    with pytest.raises(
        UserError, match="'cwm' is in several packages: uninstall all but one of pipeline-one, pipeline-two"
    ):
        find_architecture("cwm")


def test_our_own_architectures_are_not_replaced_and_versions_are_known(install: Install) -> None:
    files = package("nothing:MODEL")
    install(files | {"pyproject.toml": files["pyproject.toml"].replace("cwm =", "llama =")})
    found = find_architecture("llama")
    assert found is not None and found.class_name == "LlamaForCausalLM"
    assert foreign.installed() == "pipeline-cwm 1.0"
