"""A tiny model, for tests of everything but the model."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import LLM
from tests.compiled import link_kernels

collect_ignore = [
    *([] if os.environ.get("PIPELINE_ALL_KILLS") else ["replaced/test_upgrade.py"]),
    *([] if os.environ.get("PIPELINE_ALL_REPLICAS") else ["hosts/test_deploy_long.py"]),
]

SMALL = {"kv_cache_bytes": "16MiB", "num_threads": 1}
"""Settings of execute for a fast start. Without torch, which takes more CPU time to import than all else of a start."""


def tiny(folder: Path, **execute: Any) -> dict[str, Any]:
    """Options for an `LLM` that serves the tiny model, prepared beside its folder."""
    return {"model": folder, "cache_dir": str(link_kernels(folder.parent / "cache")), "execute": SMALL | execute}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face layout, with a chat template. Beside it is a `cache` with the compiled kernels."""
    from tests.stages.prepare.checkpoints import save_folder, tiny_llama

    template = "{% if tools %}tools: {% for t in tools %}{{ t['function']['name'] }} {% endfor %}\n{% endif %}"
    template += "{% if mood is defined %}mood: {{ mood }}\n{% endif %}"
    template += "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    folder = tmp_path_factory.mktemp("models") / "tiny"
    link_kernels(folder.parent / "cache")
    return save_folder(folder, tiny_llama(), tokenizer_config={"chat_template": template})


@pytest.fixture(scope="session")
def llm(tiny_model: Path) -> Iterator[LLM]:
    """An `LLM` for tests that leave it unchanged."""
    with LLM(**tiny(tiny_model)) as llm:
        yield llm
