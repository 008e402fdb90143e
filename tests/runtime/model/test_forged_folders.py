"""A FIFO in place of a file of a prepared folder, which another user of a shared cache can make, holds up no start."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import ChatSettings
from pipeline.grammars.engine import Engine
from pipeline.lora.adapter_file import AdapterFile
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.weight_headers import weight_facts
from pipeline.stages.execute.weights import TensorFile
from pipeline.stages.ingest.templates import chat_templates
from pipeline.stages.prepare.cache import Cache
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.vocabulary import Vocabulary
from tests.rig import PATIENCE_S

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "config": ("model.json", lambda path: ModelConfig.load(path.parent)),
    "grammars": ("model.json", lambda path: Engine(path.parent)),
    "formats": ("added_tokens.jsonl", lambda path: ChatFormats.load(path.parent, ChatSettings())),
    "formats of a tokenizer": ("tokenizer.json", lambda path: ChatFormats.load(path.parent, ChatSettings())),
    "template": ("chat_template.jinja", lambda path: ChatFormats.load(path.parent, ChatSettings())),
    "given template": ("chat_template.jinja", lambda path: chat_templates.require_valid(path.parent, "x")),
    "vocabulary": ("tokenizer.json", Vocabulary.load),
    "weights": ("model.safetensors", TensorFile),
    "facts of the weights": ("model.safetensors", lambda path: weight_facts([path])),
    "adapter": ("a.lora", AdapterFile),
}


@pytest.mark.parametrize("name", READERS)
def test_a_fifo_is_refused_at_once(tmp_path: Path, name: str) -> None:
    file_name, read = READERS[name]
    os.mkfifo(path := tmp_path / file_name)
    errors: list[BaseException] = []

    def try_it() -> None:
        try:
            read(path)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(PATIENCE_S / 3)
    assert not thread.is_alive() and "FIFO" in str(errors[0])


@pytest.mark.parametrize("is_stamped", [False, True])
def test_an_entry_of_the_cache_with_a_fifo_is_filled_again(tmp_path: Path, is_stamped: bool) -> None:
    """Whether its stamp, which is another user's too, says that the file is empty or does not name it."""

    def fill(folder: Path) -> None:
        (folder / "model.json").write_text("")

    cache = Cache(tmp_path)
    folder = cache.ensure("key", "a test", fill, print, 1)
    assert cache.lookup("key") == folder
    if is_stamped:
        (folder / "model.json").unlink()
    os.mkfifo(folder / ("model.json" if is_stamped else "tokenizer.json"))
    assert cache.lookup("key") is None
    assert cache.ensure("key", "a test", fill, print, 1) == folder == cache.lookup("key")
    assert (folder / "model.json").is_file() and not (folder / "tokenizer.json").exists()
