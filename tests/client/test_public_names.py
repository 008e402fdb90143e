"""The public names of the package, and what importing it loads."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline

ROOT = Path(__file__).resolve().parent.parent.parent


def test_importing_the_package_loads_no_other_package() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); before = set(sys.modules); import pipeline;"
        "print([name for name in set(sys.modules) - before if name.partition('.')[0] not in sys.stdlib_module_names])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['pipeline']\n"


@pytest.mark.parametrize("name", pipeline.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(pipeline, name).__name__ == name
    assert (
        f"    from pipeline.{getattr(pipeline, name).__module__.removeprefix('pipeline.')} import"
        in (ROOT / "pipeline" / "__init__.py").read_text()
    ), "type checkers see the same"


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pipeline' has no attribute 'LMM'"):
        _ = pipeline.LMM


def test_the_blocking_client_has_the_parameters_of_the_async_client() -> None:
    ours, theirs = inspect.signature(pipeline.Client.generate), inspect.signature(pipeline.AsyncClient.generate)
    assert ours.parameters == theirs.parameters
    assert list(ours.parameters)[:3] == ["self", "prompt", "params"] and "timeout_s" in ours.parameters
    assert ours.return_annotation == "BlockingStream"
