"""Facts of the served model, for the routes that describe it. Files are read at their first use."""

import hashlib
from functools import cached_property
from pathlib import Path

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import read_file
from pipeline.runtime.model.weight_headers import WeightFacts, weight_facts
from pipeline.runtime.queues.work_pool import WorkPool
from pipeline.text.formats.chat_formats import ChatFormats


class ServedModel:
    """The prepared model in a folder, and how it is served."""

    def __init__(self, folder: Path, settings: Settings, formats: ChatFormats) -> None:
        self.config = ModelConfig.load(folder)
        self.settings = settings
        self.formats = formats
        self._folder = folder
        self._facts: WeightFacts | None = None
        self._pool = WorkPool("reading the headers of weight files")

    async def weight_facts(self) -> WeightFacts:
        """Read the headers of the weight files, in a thread."""
        if self._facts is None:
            self._facts = await self._pool.run(weight_facts, self.config.weight_paths(self._folder))
        return self._facts

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the model's description."""
        return hashlib.sha256(read_file(self._folder / "model.json")).hexdigest()

    @property
    def is_on_gpu(self) -> bool:
        return self.settings.execute.device != "cpu"
