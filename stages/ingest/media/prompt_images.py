"""The images of one prompt: they replace the placeholders of its text, or of the rendered template, and then its row
tokens."""

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
    """`images` are in the order of the prompt."""

    def __init__(self, config: MediaConfig, images: Sequence[ImageText], *, is_chat: bool = True) -> None:
        self._is_chat = is_chat
        self._config = config
        self._images = images
        self._run_lengths = [length for image in images for length in image.run_lengths]
        self.num_further = sum(self._run_lengths) - len(self._run_lengths)
        """Ids that `expand` adds."""

    @property
    def _param(self) -> str:
        return "messages" if self._is_chat else "prompt"

    def put_into(self, text: str, masked: str | None) -> tuple[str, str | None]:
        """Replace the placeholders of a text or a rendered chat; see `placeholders.replace`. Raises RequestRejected."""
        try:
            return placeholders.replace(text, masked, self._config.placeholder, [image.text for image in self._images])
        except WrongCount as error:
            if self._is_chat:
                message = (
                    f"the chat template writes {error.num_found} placeholders for {error.num_images} images: images "
                    "must be in messages whose images it shows"
                )
            else:
                message = (
                    f"the prompt has {error.num_found} times {self._config.placeholder}, which stands for an image; "
                    f"the number of images is {error.num_images}"
                )
            raise RequestRejected(Failure(400, message, self._param)) from error

    def expand(self, ids: Ids) -> tuple[Ids, list[list[Run]]]:
        """The ids with one for each row of embeddings, and the runs of each image. Raises RequestRejected."""
        try:
            expanded, runs = placeholders.expand(ids, self._config.row_id, self._run_lengths)
        except WrongCount as error:
            kind = "chat" if self._is_chat else "prompt"
            message = f"the {kind} has {self._config.row_token} as text, which stands for images"
            raise RequestRejected(Failure(400, message, self._param)) from error
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
