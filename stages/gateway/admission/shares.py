"""What one API key may have open: not all that there is, so that others find room at once. Pure.

The most that it may have is seven times what is left free (Choudhury and Hahne, "Dynamic queue length thresholds",
1998). So a key alone has seven eighths, two have seven fifteenths each, and some room is always left for one that has
nothing open. A server with one key has no such bound.
"""

from collections.abc import Iterable

from pipeline.runtime.security.api_keys import NO_SCOPE, Keys
from pipeline.stages.gateway.admission.admission import Admission
from pipeline.stages.gateway.admission.media_admission import MediaAdmission
from pipeline.stages.gateway.errors import overloaded
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest

FREE_PARTS = 7


def max_grown_bytes(admission: Admission, keys: Keys | None) -> int:
    """What open requests may keep before some of them wait: with several keys, an eighth of the limit is left for new
    requests, so that no key's output takes the room of all others."""
    most = admission.max_bytes
    return most if keys is None or len(keys.all) < 2 else most - most // (FREE_PARTS + 1)


def check_share(
    admission: Admission,
    keys: Keys | None,
    parsed: ParsedRequest,
    num_tokens: int,
    open_requests: Iterable[PromptRequest],
    num_bytes: int = 0,
    num_output_bytes: int = 0,
) -> None:
    """Raises ApiError, 503, if a request's key would have more of the sequences, of the prompt tokens or of the bytes
    than it may. `num_output_bytes` are those of output that comes all at once. The first of a key that has nothing open
    is admitted whatever it needs."""
    scope, num_sequences = parsed.scope, len(parsed.prompts) * parsed.num_sequences
    free = admission.max_sequences - admission.num_sequences - num_sequences
    free_tokens = admission.max_tokens - admission.num_tokens - num_tokens
    free_bytes = admission.max_bytes - admission.num_bytes - num_bytes - num_output_bytes
    free_base = admission.max_base_bytes - admission.num_base_bytes - num_bytes
    is_full = (
        2 * free < admission.max_sequences
        or 2 * free_tokens < admission.max_tokens
        or 2 * free_bytes < admission.max_bytes
        or 2 * free_base < admission.max_base_bytes
    )
    if keys is None or scope == NO_SCOPE or not is_full or len(keys.all) < 2:
        return
    own = [one for one in open_requests if one.request.parsed.scope == scope]
    own_sequences, own_tokens = sum(one.submit.options.n for one in own), sum(one.num_counted for one in own)
    requests = {one.request.number: one.request for one in own}.values()
    own_bytes = (
        sum(one.num_bytes for one in own) + sum(one.num_bytes for one in requests) + num_bytes + num_output_bytes
    )
    own_base = sum(one.base_bytes for one in own) + sum(one.num_base_bytes for one in requests) + num_bytes
    for name, num, left, setting in (
        ("sequences", own_sequences + num_sequences, free, "max_open_sequences"),
        ("prompt tokens", own_tokens + num_tokens, free_tokens, "max_open_tokens"),
        ("bytes", own_bytes, free_bytes, "max_open_bytes"),
        ("bytes without output", own_base, free_base, "max_open_bytes"),
    ):
        if own:
            _check_part(name, num, left, setting)


def check_media_share(
    media: MediaAdmission,
    keys: Keys | None,
    scope: str,
    num_sequences: int,
    num_tokens: int,
    num_bytes: int,
    open_requests: Iterable[PromptRequest],
) -> None:
    """Raises ApiError, 503, if the key of a request with images would have more of what such requests may hold than it
    may, as `check_share`."""
    own = [one for one in open_requests if one.media_bytes and one.request.parsed.scope == scope]
    if keys is None or scope == NO_SCOPE or len(keys.all) < 2 or not own:
        return
    for name, num, left, setting in (
        (
            "sequences with images",
            sum(one.submit.options.n for one in own) + num_sequences,
            media.max_sequences - media.num_sequences - num_sequences,
            "max_open_sequences",
        ),
        (
            "prompt tokens of requests with images",
            sum(one.num_counted for one in own) + num_tokens,
            media.max_tokens - media.num_tokens - num_tokens,
            "max_open_tokens",
        ),
        (
            "bytes of images",
            sum(one.media_bytes for one in own) + num_bytes,
            media.max_bytes - media.num_bytes - num_bytes,
            "max_open_media_bytes",
        ),
    ):
        _check_part(name, num, left, setting)


def _check_part(name: str, num: int, left: int, setting: str) -> None:
    if num > FREE_PARTS * left:
        raise overloaded(
            f"with this request, {num} {name} of this API key are open, and what is left of gateway.{setting} is for "
            "other keys",
            1,
            by_size=True,
        )
