"""Adds the tokens that end a reply in the model's chat format to the ids that end a sequence.

Models name them in generation_config.json, but .gguf files and fine-tuned models often name only one: gpt-oss ends a
call with `<|call|>` and an answer with `<|return|>`.
"""

from pathlib import Path

import msgspec

from pipeline.config.settings import ChatSettings
from pipeline.runtime.model_folder import ModelConfig
from pipeline.text.formats.chat_formats import ChatFormats


def add_reply_ends(folder: Path) -> None:
    """Change the config of a prepared folder."""
    config = ModelConfig.load(folder)
    stops = [one for one in ChatFormats.load(folder, ChatSettings()).stops if one < config.vocab_size]
    eos_ids = list(dict.fromkeys([*config.eos_ids, *stops]))
    if eos_ids != list(config.eos_ids):
        msgspec.structs.replace(config, eos_ids=eos_ids).save(folder)
