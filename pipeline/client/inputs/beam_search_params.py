"""Parameters of beam search, with the names, meanings and defaults of vLLM."""

from typing import Literal

import msgspec

from pipeline.client.inputs.checks import check_integer, check_number, shown
from pipeline.client.inputs.sampling_params import MAX_TEMPERATURE, MOST, SamplingParams


class BeamSearchParams(msgspec.Struct, frozen=True):
    """How a beam search runs. The constructor raises TypeError or ValueError that names the invalid field and the valid
    values."""

    beam_width: int
    """Beams that the search follows, and sequences that it returns."""
    max_tokens: int
    """Maximum number of output ids of each sequence."""
    ignore_eos: bool = False
    temperature: float = 0.0
    """No effect: beam search draws no samples."""
    length_penalty: float = 1.0
    """A sequence's score is the sum of its ids' log probabilities, divided by length ** length_penalty. Above 0 favors
    long sequences."""
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False
    """As in transformers. True: the search ends when it has found `beam_width` sequences. False: when no beam has a
    better score at its present length. "never": when no beam can get one."""

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, MOST["n"])
        check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """The same as parameters of `generate`, with log probabilities."""
        if self.max_tokens is None:
            raise TypeError(f"max_tokens must be an integer, not {shown(self.max_tokens)}")
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
            use_beam_search=True,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )
