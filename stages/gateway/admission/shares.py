"""What one API key may have open: not all that there is, so that others find room at once. Pure.

The most that it may have is seven times what is left free (Choudhury and Hahne, "Dynamic queue length thresholds",
1998). So a key alone has seven eighths, two have seven fifteenths each, and some room is always left for one that has
nothing open. A server with one key has no such bound.
"""

from collections.abc import Iterable

from pipeline.runtime.security.api_keys import NO_SCOPE, Keys
from pipeline.stages.gateway.admission.admission import Admission
from pipeline.stages.gateway.errors import overloaded
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest

FREE_PARTS = 7


def check_share(
    admission: Admission,
    keys: Keys | None,
    parsed: ParsedRequest,
    num_tokens: int,
    open_requests: Iterable[PromptRequest],
) -> None:
    """Raises ApiError, 503, if a request's key would have more of the sequences or of the prompt tokens than it may.
    The first of a key that has nothing open is admitted whatever it needs."""
    scope, num_sequences = parsed.scope, len(parsed.prompts) * parsed.num_sequences
    free = admission.max_sequences - admission.num_sequences - num_sequences
    free_tokens = admission.max_tokens - admission.num_tokens - num_tokens
    is_full = 2 * free < admission.max_sequences or 2 * free_tokens < admission.max_tokens
    if keys is None or scope == NO_SCOPE or not is_full or len(keys.all) < 2:
        return
    own = [one for one in open_requests if one.request.parsed.scope == scope]
    own_sequences, own_tokens = sum(one.submit.options.n for one in own), sum(one.num_counted for one in own)
    for name, num, left, setting in (
        ("sequences", own_sequences + num_sequences, free, "max_open_sequences"),
        ("prompt tokens", own_tokens + num_tokens, free_tokens, "max_open_tokens"),
    ):
        if own and num > FREE_PARTS * left:
            raise overloaded(
                f"with this request, {num} {name} of this API key are open, and what is left of gateway.{setting} is "
                "for other keys",
                1,
                by_size=True,
            )
