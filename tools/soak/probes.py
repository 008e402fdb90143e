"""Fixed greedy requests whose output ids don't depend on the load."""

from pipeline.cli.bench import words
from pipeline.client.client import AsyncClient
from pipeline.client.inputs.sampling_params import SamplingParams
from tools.soak.requests import NUM_PREFIX_WORDS

Answer = tuple[tuple[int, ...], str]
"""The ids of all outputs, and their texts."""

PROMPTS = (
    "The capital of France is",
    words.text("probe/middle", 90),
    words.text("probe/long", 700),
    f"{words.text('prefix/0', NUM_PREFIX_WORDS)} {words.text('probe/shared', 20)}",
)
"""The last probe shares its prefix with many requests of the load."""
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


async def answer(client: AsyncClient, index: int, priority: int = 0, adapter: str | None = None) -> Answer:
    """The server's current output for a probe, with an adapter if one is named. Raises RequestError, ConnectionLost."""
    ids: list[int] = []
    text = ""
    async for output in client.generate(PROMPTS[index], PARAMS, priority=priority, adapter=adapter):
        ids += output.token_ids
        text += output.text
    return tuple(ids), text


def difference(expected: Answer, found: Answer) -> str:
    """Describe where two outputs diverge; empty if they are equal."""
    if expected == found:
        return ""
    (ids, text), (other_ids, other_text) = expected, found
    if ids == other_ids:
        return f"the same ids, but the text {other_text!r} instead of {text!r}"
    index = next(
        (index for index, (one, other) in enumerate(zip(ids, other_ids, strict=False)) if one != other),
        min(len(ids), len(other_ids)),
    )
    return f"{len(other_ids)} ids instead of {len(ids)}, the first other one at {index}"
