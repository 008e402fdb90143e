"""Cuts the tokens of a text into chunks, and names the positions of a chunk that count.

Both are those of llama.cpp's llama-perplexity (tools/perplexity/perplexity.cpp), so that its results can be compared.
"""

from collections.abc import Sequence

from pipeline.errors import UserError

CHUNK_SIZE = 256
"""Tokens of a chunk."""
COUNTED = range(CHUNK_SIZE // 2, CHUNK_SIZE - 1)
"""Positions whose next-token distributions count: 127 of each chunk. Earlier ones have little context, and the last
one predicts a token of the next chunk."""
MIN_CHUNKS = 2


def chunks_of(ids: Sequence[int], bos_id: int | None, source: str) -> list[list[int]]:
    """Consecutive chunks of `CHUNK_SIZE` ids. A shorter rest is left out. `bos_id` replaces the first id of each chunk,
    unless it is None.

    Raises UserError, naming `source`, if the ids fill fewer than `MIN_CHUNKS` chunks.
    """
    num_chunks = len(ids) // CHUNK_SIZE
    if num_chunks < MIN_CHUNKS:
        raise UserError(
            f"{source} has {len(ids)} tokens, but at least {MIN_CHUNKS * CHUNK_SIZE} are needed: {MIN_CHUNKS} chunks "
            f"of {CHUNK_SIZE}"
        )
    chunks = [list(ids[i * CHUNK_SIZE : (i + 1) * CHUNK_SIZE]) for i in range(num_chunks)]
    if bos_id is not None:
        for chunk in chunks:
            chunk[0] = bos_id
    return chunks
