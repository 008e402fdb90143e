"""What the prompts of a parsed request become when it is opened: `Submit` for the stages, and their sequences."""

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.security.api_keys import scope_id, scoped_salt
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.open_requests.prompt_request import ID_BYTES, SequenceOutput
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest

FIRST_ATTEMPT = 1
ID_BITS = 63
"""Of a request id. Those of a request's prompts follow each other."""


def new_submits(stage: "Stage[m.GatewayInbox]", parsed: ParsedRequest) -> list[m.Submit]:
    """The first attempt of each prompt. What is read for all of them is recorded once: there may be a thousand."""
    replay = stage.replay_context
    first_id, arrival_s = replay.randbits(ID_BITS), replay.time()
    cache_salt = parsed.options.cache_salt
    if not stage.settings.gateway.share_prefix_cache:
        cache_salt = scoped_salt(parsed.scope, cache_salt)
    scope = scope_id(parsed.scope)
    options = msgspec.structs.replace(parsed.options, seed=parsed.seed or 0, cache_salt=cache_salt)
    # The client's seed is used for each prompt, so that a list gives what each prompt gives alone. Without one, equal
    # prompts get different outputs.
    has_own_seeds = parsed.seed is None and not parsed.is_pooled
    return [
        m.Submit(
            request_id=(first_id + index) % 2**ID_BITS,
            attempt=FIRST_ATTEMPT,
            gateway=stage.replica,
            arrival_s=arrival_s,
            prompt=prompt,
            options=msgspec.structs.replace(options, seed=replay.randbits(64)) if has_own_seeds else options,
            outputs=list(parsed.outputs),
            prompt_options=parsed.prompt_options,
            gateway_incarnation=stage.launch.incarnation,
            template_s=0.0 if parsed.resumption is None else parsed.resumption.arrival_s,
            scope_id=scope,
            images=parsed.images,
        )
        for index, prompt in enumerate(parsed.prompts)
    ]


def new_sequences(parsed: ParsedRequest) -> list[SequenceOutput]:
    """Those of one prompt, with the output that the client has already."""
    if not parsed.outputs:
        return [SequenceOutput() for _ in range(parsed.num_sequences)]
    return [
        SequenceOutput(
            ids=bytearray(ids),
            num_received=len(ids) // ID_BYTES,
            is_resumed=bool(ids) and not parsed.options.repeats_received,
        )
        for ids in parsed.outputs
    ]
