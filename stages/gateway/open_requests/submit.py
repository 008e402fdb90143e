"""What a prompt of a parsed request becomes when it is opened: `Submit` for the stages, and its sequences."""

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.security.api_keys import scope_id, scoped_salt
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.open_requests.prompt_request import ID_BYTES, SequenceOutput
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest

FIRST_ATTEMPT = 1


def new_submit(stage: "Stage[m.GatewayInbox]", parsed: ParsedRequest, prompt: m.Prompt) -> m.Submit:
    """The first attempt of a prompt."""
    replay = stage.replay_context
    # The client's seed is used for each prompt, so that a list gives what each prompt gives alone. Without one, equal
    # prompts get different outputs.
    seed = replay.randbits(64) if parsed.seed is None else parsed.seed
    cache_salt = parsed.options.cache_salt
    if not stage.settings.gateway.share_prefix_cache:
        cache_salt = scoped_salt(parsed.scope, cache_salt)
    return m.Submit(
        request_id=replay.randbits(63),
        attempt=FIRST_ATTEMPT,
        gateway=stage.replica,
        arrival_s=replay.time(),
        prompt=prompt,
        options=msgspec.structs.replace(parsed.options, seed=seed, cache_salt=cache_salt),
        outputs=list(parsed.outputs),
        prompt_options=parsed.prompt_options,
        gateway_incarnation=stage.launch.incarnation,
        template_s=0.0 if parsed.resumption is None else parsed.resumption.arrival_s,
        scope_id=scope_id(parsed.scope),
    )


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
