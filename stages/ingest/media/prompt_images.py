"""The images of one chat: they replace the placeholders of the rendered template, and then its row tokens."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from pipeline.media import placeholders
from pipeline.media.config import MediaConfig
from pipeline.media.placeholders import Run, WrongCount
from pipeline.runtime.messages import Failure
from pipeline.stages.ingest.prompts.ids import Ids
from pipeline.stages.ingest.prompts.rejection import RequestRejected


class ImageText(Protocol):
    """What stands for an image in a prompt, as in `ProcessedImage`."""

    @property
    def text(self) -> str: ...

    @property
    def run_lengths(self) -> tuple[int, ...]: ...


class PromptImages:
    """`images` are in the order of the chat."""

    def __init__(self, config: MediaConfig, images: Sequence[ImageText]) -> None:
        self._config = config
        self._images = images
        self._run_lengths = [length for image in images for length in image.run_lengths]
        self.num_further = sum(self._run_lengths) - len(self._run_lengths)
        """Ids that `expand` adds."""

    def put_into(self, text: str, masked: str | None) -> tuple[str, str | None]:
        """Replace the placeholders of a rendered chat; see `placeholders.replace`. Raises RequestRejected."""
        try:
            return placeholders.replace(text, masked, self._config.placeholder, [image.text for image in self._images])
        except WrongCount as error:
            message = (
                f"the chat template writes {error.num_found} placeholders for {error.num_images} images: images must "
                "be in messages whose images it shows"
            )
            raise RequestRejected(Failure(400, message, "messages")) from error

    def expand(self, ids: Ids) -> tuple[Ids, list[list[Run]]]:
        """The ids with one for each row of embeddings, and the runs of each image. Raises RequestRejected."""
        try:
            expanded, runs = placeholders.expand(ids, self._config.row_id, self._run_lengths)
        except WrongCount as error:
            message = f"the chat has {self._config.row_token} as text, which stands for images"
            raise RequestRejected(Failure(400, message, "messages")) from error
        remaining = iter(runs)
        return expanded, [[next(remaining) for _ in image.run_lengths] for image in self._images]

    def find(self, ids: Ids) -> list[list[Run]]:
        """The runs of each image in ids that `expand` has made before. Raises RequestRejected."""
        at = np.flatnonzero(ids == self._config.row_id)
        begins = np.concatenate(([0], np.cumsum(self._run_lengths)))
        if len(at) != begins[-1] or any(at[end - 1] - at[begin] != end - begin - 1 for begin, end in pairwise(begins)):
            message = f"the prompt's ids have {len(at)} of {self._config.row_token}, and its images other numbers"
            raise RequestRejected(Failure(400, message, "prompt"))
        remaining = iter(Run(int(at[begin]), length) for begin, length in zip(begins, self._run_lengths, strict=False))
        return [[next(remaining) for _ in image.run_lengths] for image in self._images]
