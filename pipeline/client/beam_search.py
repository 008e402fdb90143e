"""`beam_search` of `LLM`, with vLLM's names."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import msgspec

from pipeline.client.inputs.beam_search_params import BeamSearchParams
from pipeline.client.inputs.prompts import Prompt
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.client.logprobs import Logprob
from pipeline.client.outputs import RequestOutput
from pipeline.errors import UserError


class BeamSearchSequence(msgspec.Struct):
    """A sequence that a beam search has found."""

    tokens: list[int]
    """The ids of the prompt and of the output."""
    logprobs: list[dict[int, Logprob]]
    """Of each output id."""
    cum_logprob: float
    """The sum of the log probabilities of the output ids."""
    text: str
    """The output's text."""
    finish_reason: str | None
    """`stop` or `length`"""
    stop_reason: int | str | None
    score: float
    """`cum_logprob`, divided by length ** length_penalty."""


class BeamSearchOutput(msgspec.Struct):
    """The result of one prompt's beam search."""

    sequences: list[BeamSearchSequence]
    """The best first."""

    @classmethod
    def of(cls, output: RequestOutput, params: BeamSearchParams) -> "BeamSearchOutput":
        """From the output of a request with `params`."""
        sequences = []
        for one in output.outputs:
            cum_logprob = one.cumulative_logprob or 0.0
            score = cum_logprob / max(1, len(one.token_ids)) ** params.length_penalty
            sequences.append(
                BeamSearchSequence(
                    output.prompt_token_ids + one.token_ids,
                    one.logprobs or [],
                    cum_logprob,
                    one.text,
                    one.finish_reason,
                    one.stop_reason,
                    score,
                )
            )
        return cls(sequences)


def checked_beam_params(params: BeamSearchParams) -> BeamSearchParams:
    """Raises UserError for another type."""
    if not isinstance(params, BeamSearchParams):
        raise UserError(f"params must be BeamSearchParams, not {type(params).__name__}")
    return params


class BeamSearchMethods(ABC):
    """Needs `generate` of `LLM`."""

    @abstractmethod
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams | None] | None = None,
        *,
        progress: bool = True,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]: ...

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        *,
        progress: bool = True,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the `beam_width` best sequences for one prompt or many; see `generate`. Outputs are in the order of the
        prompts."""
        sampling_params = checked_beam_params(params).sampling_params()
        outputs = self.generate(
            prompts,
            sampling_params,
            progress=progress,
            use_tqdm=use_tqdm,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
        )
        return [BeamSearchOutput.of(output, params) for output in outputs]
