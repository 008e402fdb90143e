"""The served model: what of its files the gateway needs at once, and facts for the routes that describe it, which are
read at their first use."""

import hashlib
from functools import cached_property
from pathlib import Path

from pipeline.config.settings import Settings
from pipeline.media import support
from pipeline.runtime import messages as m
from pipeline.runtime.model import generation_config
from pipeline.runtime.model.generation_config import GenerationDefaults
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import read_file
from pipeline.runtime.model.weight_headers import WeightFacts, weight_facts
from pipeline.runtime.queues.work_pool import WorkPool
from pipeline.text.formats.chat_formats import ChatFormats


class ServedModel:
    """The prepared model in a folder, and how it is served."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        config: ModelConfig,
        formats: ChatFormats,
        defaults: GenerationDefaults,
        why_no_images: str = "",
    ) -> None:
        """`why_no_images` is `support.why_not` of the folder."""
        self.config = config
        self.settings = settings
        self.formats = formats
        self.defaults = defaults
        self._folder = folder
        self._why_no_images = why_no_images
        self._facts: WeightFacts | None = None
        self._pool = WorkPool("reading the headers of weight files")

    @classmethod
    def load(cls, folder: Path, settings: Settings) -> "ServedModel":
        """Read the files of a prepared folder. That takes time, which files from elsewhere choose: a process that
        serves other models meanwhile does it in a thread. Raises UserError, OSError and msgspec.DecodeError."""
        config, formats = ModelConfig.load(folder), ChatFormats.load(folder, settings.chat)
        defaults = generation_config.load(settings, folder)
        return cls(folder, settings, config, formats, defaults, support.why_not(folder))

    async def weight_facts(self) -> WeightFacts:
        """Read the headers of the weight files, in a thread."""
        if self._facts is None:
            self._facts = await self._pool.run(weight_facts, self.config.weight_paths(self._folder))
        return self._facts

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the model's description."""
        return hashlib.sha256(read_file(self._folder / "model.json")).hexdigest()

    def why_no_images(self, facts: m.ExecuteFacts) -> str:
        """Why requests can't have images; empty if they can. The words follow "it is an image, and"."""
        if self._why_no_images or facts.num_encoder_rows:
            return self._why_no_images
        if self.is_on_gpu:
            return "this server runs the model on a GPU, where images are not supported yet"
        key = "execute.encoder_cache_bytes" if self.settings.limits.max_images else "limits.max_images"
        return f"this server takes none, because {key} is 0"

    @property
    def is_on_gpu(self) -> bool:
        return self.settings.execute.device != "cpu"
