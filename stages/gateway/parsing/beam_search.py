"""The fields of beam search, and what it is not combined with. Pure.

Beam search draws no samples: temperature, top_p, top_k, min_p and seed have no effect on it, and neither have penalties
that come from the model's defaults. It follows the model's own distribution, so whatever changes that is an error.
"""

import msgspec

from pipeline.client.protocol.sampling import SamplingFields
from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError, invalid

UNSUPPORTED_FIELDS = {
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logprob_token_ids": (None, []),
    "prompt_logprobs": (None,),
    "thinking_token_budget": (None, -1),
}
"""Fields that are not allowed, and the values at which they do nothing."""


def with_beam_search(options: m.GenerationOptions, fields: SamplingFields) -> m.GenerationOptions:
    """The options of a request, of which `n` is final, for beam search if it asks for that. Raises ApiError."""
    if not fields.use_beam_search:
        if fields.length_penalty not in (None, 1):
            raise _needs_beam_search("length_penalty")
        if fields.early_stopping not in (None, False):
            raise _needs_beam_search("early_stopping")
        return options
    for name, accepted in UNSUPPORTED_FIELDS.items():
        if getattr(fields, name) not in accepted:
            raise _not_allowed(name)
    if options.n != (fields.n or 1):
        raise invalid("best_of", f"'best_of' must equal n = {fields.n or 1}, the beam width", "invalid_value")
    options = msgspec.structs.replace(options, repetition_penalty=1.0)
    check_grammar(options)
    return options


def check_grammar(options: m.GenerationOptions) -> None:
    """Raises ApiError if the output of a beam search must match a grammar."""
    if options.use_beam_search and options.grammar is not None:
        raise _not_allowed(options.grammar.param)


def _needs_beam_search(name: str) -> ApiError:
    return invalid(name, f"'{name}' is only allowed together with use_beam_search = true", "invalid_value")


def _not_allowed(name: str) -> ApiError:
    return invalid(name, f"'{name}' is not allowed together with use_beam_search = true", "invalid_value")
