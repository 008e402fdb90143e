"""The table of allowed imports holds, and the check finds violations."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.check_imports import EXCEPTIONS, FLOORS, LINKED, ROOT, unused_exceptions, wrong_imports


def plant(root: Path, file: str, source: str) -> list[str]:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return wrong_imports(root)


def test_no_file_has_a_forbidden_import() -> None:
    assert wrong_imports() == []


def test_every_part_of_the_package_has_one_floor() -> None:
    parts = [path for path in (ROOT / "pipeline").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    names = sorted(path.stem for path in parts if path.name not in LINKED)
    assert sorted(name for floor in FLOORS for name in floor) == names


def test_exceptions_from_the_floors_only_become_fewer() -> None:
    assert unused_exceptions() == [], "nothing needs them: delete them"
    assert sum(map(len, EXCEPTIONS.values())) <= 6


def test_an_exception_that_nothing_needs_is_found(tmp_path: Path) -> None:
    file = "pipeline/client/embedded/entry.py"
    plant(tmp_path, file, "from pipeline.cli.complain import complain")
    found = unused_exceptions(tmp_path)
    assert f"tools/check_imports.py: {file} no longer imports supervisor: delete the exception" in found
    assert f"tools/check_imports.py: {file} no longer imports cli: delete the exception" not in found


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("config/a.py", "import torch", "config/a.py:1: config never imports torch"),
        ("config/a.py", "from pipeline.shm import arena", "config/a.py:1: config may not import pipeline.shm.arena"),
        ("config/a.py", "from ..shm import arena", "config/a.py:1: config may not import pipeline.shm.arena"),
        ("config/a.py", "from pipeline import errors", "config/a.py:1: config may not import pipeline.errors"),
        ("config/a.py", "import pipeline", "config/a.py:1: config may not import pipeline"),
        ("shm/a.py", "import zmq.asyncio", "shm/a.py:1: shm never imports zmq"),
        ("shm/a.py", "x = 1\nimport aiohttp", "shm/a.py:2: shm never imports aiohttp"),
        (
            "kernels/cpu/a.py",
            "from pipeline import config",
            "kernels/cpu/a.py:1: kernels may not import pipeline.config",
        ),
        ("kernels/a.py", "from transformers import x", "kernels/a.py:1: kernels never imports transformers"),
        ("pipeline/a.py", "def f():\n    import torch", "pipeline/a.py:2: pipeline never imports torch"),
        (
            "pipeline/a.py",
            "from safetensors.torch import x",
            "pipeline/a.py:1: pipeline never imports safetensors.torch",
        ),
        ("pipeline/a.py", "from .stages import x", "pipeline/a.py:1: pipeline may not import pipeline.stages.x"),
        ("pipeline/a.py", "from . import kernels", "pipeline/a.py:1: pipeline may not import pipeline.kernels"),
        ("pipeline/b/c.py", "from .. import kernels", "pipeline/b/c.py:1: pipeline may not import pipeline.kernels"),
        (
            "pipeline/a.py",
            "import pipeline.stages.x.stage",
            "pipeline/a.py:1: pipeline may not import pipeline.stages.x.stage",
        ),
        (
            "pipeline/a.py",
            "import importlib\nimportlib.import_module('pipeline.stages.x')",
            "pipeline/a.py:2: pipeline may not import pipeline.stages.x",
        ),
        (
            "pipeline/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
            "pipeline/a.py:3: pipeline never imports torch",
        ),
        ("pipeline/a.py", "from tests import rig", "pipeline/a.py:1: pipeline never imports tests"),
        *(
            (
                f"pipeline/{low}/a.py",
                f"def f():\n    {source}",
                f"pipeline/{low}/a.py:2: pipeline/{low.partition('/')[0]} may not import {target}: "
                f"{high} is on no lower floor",
            )
            for low, source, target, high in (
                ("runtime", "from pipeline.replay import recorder", "pipeline.replay.recorder", "replay"),
                ("runtime", "from ..cli import out_file", "pipeline.cli.out_file", "cli"),
                ("runtime", "import pipeline.supervisor.loop", "pipeline.supervisor.loop", "supervisor"),
                ("metrics", "from pipeline.runtime import topology", "pipeline.runtime.topology", "runtime"),
                (
                    "replay",
                    "from pipeline.supervisor.processes.child import Child",
                    "pipeline.supervisor.processes.child.Child",
                    "supervisor",
                ),
                ("replay", "import pipeline.lora.convert", "pipeline.lora.convert", "lora"),
                ("http_server", "from pipeline import supervisor", "pipeline.supervisor", "supervisor"),
                ("lora", "from pipeline.http_server.errors import x", "pipeline.http_server.errors.x", "http_server"),
                ("text/formats", "from pipeline.grammars import x", "pipeline.grammars.x", "grammars"),
                ("supervisor", "from pipeline.hosts.hosts import Hosts", "pipeline.hosts.hosts.Hosts", "hosts"),
                ("client", "import pipeline.cli.complain", "pipeline.cli.complain", "cli"),
            )
        ),
        (
            "pipeline/errors.py",
            "from pipeline.runtime.log import logs",
            "pipeline/errors.py:1: pipeline/errors may not import pipeline.runtime.log.logs: "
            "runtime is on no lower floor",
        ),
        (
            "stages/ingest/a.py",
            "from pipeline.stages.gateway.parsing import build",
            "stages/ingest/a.py:1: stages.ingest may not import pipeline.stages.gateway.parsing.build",
        ),
        (
            "stages/ingest/a.py",
            "from ..gateway.parsing import build",
            "stages/ingest/a.py:1: stages.ingest may not import pipeline.stages.gateway.parsing.build",
        ),
        (
            "stages/schedule/a.py",
            "from pipeline.kernels import x",
            "stages/schedule/a.py:1: stages.schedule may not import pipeline.kernels.x",
        ),
        ("stages/schedule/a.py", "import torch", "stages/schedule/a.py:1: stages.schedule never imports torch"),
        (
            "stages/execute/a.py",
            "import huggingface_hub",
            "stages/execute/a.py:1: stages.execute never imports huggingface_hub",
        ),
        *(
            (
                f"stages/execute/{module}.py",
                f"def f():\n    {source}",
                f"stages/execute/{module}.py:2: stages.execute.{module.replace('/', '.')} never imports "
                f"pipeline.stages.execute.{banned}",
            )
            for module, source, banned in (
                ("cuda/a", "from pipeline.stages.execute.cpu.program import Program", "cpu"),
                ("cuda/graphs/a", "from ...cpu import runner", "cpu"),
                ("cpu/a", "import pipeline.stages.execute.cuda.device", "cuda"),
                ("models/a", "from pipeline.stages.execute.cpu.program import Program", "cpu"),
                ("layers/a", "from pipeline.stages.execute import cpu", "cpu"),
                ("ranks/a", "from ..cuda.ranks import join", "cuda"),
                ("grammar_masks/a", "import pipeline.stages.execute.cpu", "cpu"),
                ("kv", "from pipeline.stages.execute.cpu.program import SwapArray", "cpu"),
                ("stages", "from .cuda import runner", "cuda"),
                ("measuring/cases", "from pipeline.stages.execute.cpu.runner import CpuRunner", "cpu"),
                ("cuda/measuring/a", "from pipeline.stages.execute.measuring.check import run", "measuring.check"),
                ("cpu/a", "from pipeline.stages.execute.stage import SPIN_COUNT", "stage"),
            )
        ),
        (
            "stages/prepare/a.py",
            "import pipeline.kernels.x",
            "stages/prepare/a.py:1: stages.prepare may not import pipeline.kernels.x",
        ),
        ("stages/execute/a.py", "import kernels", "stages/execute/a.py:1: imports kernels; write pipeline.kernels"),
        ("tests/a.py", "from config import load", "tests/a.py:1: imports config.load; write pipeline.config.load"),
        ("tools/check", "#!/usr/bin/env python3\nimport shm", "tools/check:2: imports shm; write pipeline.shm"),
    ],
)
def test_a_forbidden_import_is_found_with_its_place(tmp_path: Path, file: str, source: str, fault: str) -> None:
    assert plant(tmp_path, file, source) == [fault]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("config/a.py", "from pipeline.config import keys\nfrom . import keys\nimport msgspec, torchlike"),
        ("kernels/a.py", "import torch\nfrom pipeline.kernels import b"),
        ("pipeline/a.py", "from pipeline import messages\nfrom pipeline.shm.arena import Arena\nimport zmq, aiohttp"),
        ("pipeline/runtime/a.py", "from pipeline.errors import UserError\nfrom . import b\nfrom ..metrics import c"),
        ("pipeline/cli/a.py", "from pipeline.supervisor import b\nfrom pipeline.runtime import c\nimport pipeline"),
        ("pipeline/supervisor/loop.py", "from pipeline.hosts.hosts import Hosts"),
        ("stages/ingest/a.py", "from pipeline.stages.ingest import b\nfrom . import c\nfrom pipeline import stage"),
        ("stages/execute/a.py", "import torch\nfrom pipeline.kernels import x\nfrom pipeline.shm import arrays"),
        ("stages/execute/stage.py", "from .cpu import runner\nfrom .cuda import runner"),
        ("stages/execute/measuring/check.py", "from pipeline.stages.execute.cpu.runner import CpuRunner"),
        ("stages/execute/cpu/drafts/a.py", "from pipeline.stages.execute.cpu import b\nfrom ...models import c"),
        ("stages/prepare/a.py", "import torch, transformers, huggingface_hub"),
        ("tests/a.py", "import torch, transformers\nfrom pipeline.stages.x import stage\nfrom tests.config import a"),
    ],
)
def test_allowed_imports_pass(tmp_path: Path, file: str, source: str) -> None:
    assert plant(tmp_path, file, source) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "stages").symlink_to("../stages")
    assert plant(tmp_path, "stages/prepare/a.py", "import transformers") == []


def test_the_command_line_loads_neither_torch_nor_the_stages() -> None:
    code = (
        "import sys; import pipeline.__main__; pipeline.__main__._parser();"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'zmq', 'aiohttp', 'numpy', 'rich'};"
        "print(sorted(heavy & set(sys.modules)), [name for name in sys.modules if name.startswith('pipeline.stages')])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.append({str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[] []\n"


def test_ctrl_c_while_the_command_line_is_loaded_ends_it_quietly() -> None:
    code = """
import sys
class CtrlC:
    def find_spec(name, path, target=None):
        if name == "pipeline.cli.commands.chat":
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC)
import pipeline.__main__
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")
