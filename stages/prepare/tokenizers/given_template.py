"""The setting `chat_template`: a file with another chat template than the model's.

The file is read once, at the start: a copy of the prepared folder with this template is an entry of the cache, whose
weights are those of the folder. So all processes, their successors and replays have the same template.
"""

import hashlib
from pathlib import Path

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.cache import Cache
from pipeline.stages.prepare.progress import Progress
from pipeline.stages.prepare.sharing import copy_of
from pipeline.stages.prepare.sources.chat_templates import DEFAULT, PREPARED, text_of, write
from pipeline.stages.prepare.sources.source import ModelError, expanded, is_file


def read(settings: Settings) -> str | None:
    """The template of the setting; None if there is none. Raises ModelError if it can't be read; ingest checks that it
    is a template."""
    if not settings.chat_template:
        return None
    path = expanded(settings.chat_template, "chat_template").absolute()
    try:
        if not is_file(path):
            raise ModelError(f"{path} is missing, or no regular file")
        if not (text := text_of(path)).strip():
            raise ModelError(f"{path} is empty")
        return text
    except ModelError as error:
        raise ModelError(f"chat_template: {error}; give a file with a Jinja template") from error


def apply(template: str, folder: Path, settings: Settings, cache: Cache, progress: Progress) -> Path:
    """The prepared folder of the model in `folder` with another template for all chats, new or from the cache."""
    from pipeline.stages.prepare.encoders import pair_templates
    from pipeline.stages.prepare.tokenizers.reply_ends import add_reply_ends

    def fill(copy: Path) -> None:
        copy_of(folder, copy)
        for name in PREPARED.values():
            (copy / name).unlink(missing_ok=True)
        write({DEFAULT: template}, Path(settings.chat_template), copy)
        pair_templates.with_given(ModelConfig.load(copy)).save(copy)
        add_reply_ends(copy, settings.supervisor.start_timeout_s)

    digest = hashlib.sha256(template.encode()).hexdigest()
    source = f"{folder.name} with {settings.chat_template}"
    key = f"{folder.name}-template-{digest[:16]}"
    return cache.ensure(key, source, fill, progress.say, settings.supervisor.prepare_timeout_s)
