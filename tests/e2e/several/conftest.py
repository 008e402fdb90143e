"""Servers of several tiny models: two Llamas and an encoder."""

from pathlib import Path

import pytest

from tests.compiled import link_kernels
from tests.stages.execute.encoders.tiny_encoders import VARIANTS, make
from tests.stages.prepare.checkpoints import save_folder, tiny_llama

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ENCODER = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama` and `bert`, and a `cache` with the compiled kernels."""
    found = tmp_path_factory.mktemp("several")
    save_folder(found / "llama", tiny_llama(), tokenizer_config={"chat_template": TEMPLATE})
    save_folder(found / "bert", make(VARIANTS["bert"]), tokenizer_config=ENCODER)
    link_kernels(found / "cache")
    return found


def config(folder: Path, name: str, memory: str = "16GiB", tables: str = "", top: str = "") -> Path:
    """A file of settings with `chat`, `other` and `vectors`, unless `tables` are others."""
    tables = (
        tables
        or f"""
[models.chat]
model = "{folder}/llama"
aliases = ["gpt-x"]
[models.other]
model = "{folder}/llama"
[models.vectors]
model = "{folder}/bert"
"""
    )
    path = folder / f"{name}.toml"
    path.write_text(
        f"""
cache_dir = "{folder}/cache"
memory_bytes = "{memory}"
{top}
[execute]
kv_cache_bytes = "16MiB"
num_threads = 1
{tables}
"""
    )
    return path
