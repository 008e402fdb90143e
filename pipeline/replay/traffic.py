"""Traces of traffic: when requests came, how long they were, and which prefixes they shared. No text and no token ids.

The file has one JSON object a line, with the fields of Mooncake's traces (Qin et al., 2024, arXiv:2407.00079), so the
public ones can be read, and ours can be read by tools for them. Our own fields are optional:

    timestamp         ms from the beginning of the trace
    input_length      tokens of the prompt
    output_length     tokens of the output; of the longest one, if there are several
    hash_ids          one number for each block of the prompt. Equal numbers mean equal tokens from the first on
    block_size        tokens of a block; 512 if it is missing
    output_hash_ids   the same for the blocks after those of the prompt, as a later turn of the conversation finds them
    output_lengths    one for each sample, if there are several (n > 1)
    priority          as the request's
    session           requests of a conversation have the same number

`ReplicaProfile` is the other half of what a simulation needs: the speed and the size of a server.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pipeline.errors import UserError

MOONCAKE_BLOCK = 512
MAX_TOKENS = 2**31 - 1
MAX_TIMESTAMP_MS = 1e15
MAX_S = 1e6

Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_S)]
Key = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class TrafficRecord(msgspec.Struct, omit_defaults=True):
    """A line of a trace; see the module."""

    timestamp: Annotated[float, Meta(ge=0, le=MAX_TIMESTAMP_MS)]
    input_length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    output_length: Tokens
    hash_ids: list[Key] = []
    block_size: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = MOONCAKE_BLOCK
    output_hash_ids: list[Key] = []
    output_lengths: list[Tokens] = []
    priority: int = 0
    session: Key | None = None


class ReplicaProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The speed and the size of a replica. `pipeline record traffic --replica FILE` writes that of a server.

    A step takes base_s + row_s·D + context_s·C + token_s·T + pair_s·P seconds: with D rows that decode and attend to C
    positions in total, T prompt tokens, and P (query, key) pairs of these, as in the scheduler's cost model."""

    base_s: Seconds = 0.006
    row_s: Seconds = 0.00008
    context_s: Seconds = 1.2e-8
    token_s: Seconds = 0.00012
    pair_s: Seconds = 2.5e-9
    kv_tokens: Annotated[int, Meta(ge=1, le=2**40)] = 400_000
    block_size: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Tokens of a KV block."""
    max_model_len: Annotated[int, Meta(ge=2, le=MAX_TOKENS)] = 131_072
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 128
    max_num_batched_tokens: Annotated[int, Meta(ge=16, le=2**20)] = 2048
    max_num_prefill_tokens: Annotated[int, Meta(ge=0, le=2**20)] = 0
    long_prompt_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    prompt_max_slowdown: Annotated[float, Meta(ge=0)] = 0.0
    long_prompt_max_slowdown: Annotated[float, Meta(ge=1)] = 2.0
    max_step_ms: Annotated[float, Meta(ge=0)] = 0.0
    max_open_sequences: Annotated[int, Meta(ge=1)] = 1024
    max_open_tokens: Annotated[int, Meta(ge=1)] = 2**30

    @property
    def is_known(self) -> bool:
        """Whether the server had computed enough to know its speed."""
        return self.token_s > 0 and self.base_s + self.row_s > 0


class TrafficReply(msgspec.Struct, array_like=True, frozen=True):
    """What schedule answers to `TakeTraffic`."""

    records: list[TrafficRecord]
    """Requests that have ended since the last one; if the recording ends, also those that are still open."""
    num_lost: int
    """Requests that were left out, because no command took them."""
    profile: ReplicaProfile


def line_of(record: TrafficRecord) -> bytes:
    """A line of a trace, with its end."""
    return msgspec.json.encode(record) + b"\n"


def read_trace(path: Path, limit: int | None = None) -> list[TrafficRecord]:
    """Read a trace, or its first `limit` lines, and sort it by time. Empty lines are skipped. Raises UserError with
    file, line and field if a line is wrong, or if there is none."""
    records: list[TrafficRecord] = []
    first_size: tuple[int, int] | None = None
    decoder = msgspec.json.Decoder(TrafficRecord)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                if limit is not None and len(records) >= limit:
                    break
                where = f"{path}:{number}"
                try:
                    record = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise UserError(f"{where}: {_reason(error)}") from error
                for problem in _problems(record):
                    raise UserError(f"{where}: {problem}")
                first_size = first_size or (record.block_size, number)
                if record.block_size != first_size[0]:
                    raise UserError(
                        f"{where}: block_size: it is {record.block_size}, but {first_size[0]} in line "
                        f"{first_size[1]}: all lines of a trace need the same"
                    )
                records.append(record)
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    if not records:
        raise UserError(f"{path}: has no requests: a trace has one JSON object a line")
    return sorted(records, key=lambda record: record.timestamp)


def read_profile(path: Path) -> ReplicaProfile:
    """Read a replica's profile. Raises UserError with file and field."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=ReplicaProfile)
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {_reason(error)}") from error
    if not profile.is_known:
        raise UserError(f"{path}: token_s, and base_s or row_s, need more than 0: steps take some time")
    return profile


def _problems(record: TrafficRecord) -> Iterable[str]:
    size, most = record.block_size, -(-record.input_length // record.block_size)
    if len(record.hash_ids) > most:
        yield (
            f"hash_ids: has {len(record.hash_ids)} numbers, but {record.input_length} tokens have {most} blocks of "
            f"{size}; if the blocks have another size, set block_size"
        )
    if record.output_lengths and max(record.output_lengths) != record.output_length:
        yield f"output_length: needs the largest of output_lengths, {max(record.output_lengths)}"
    total = record.input_length + record.output_length
    if len(record.hash_ids[: record.input_length // size]) + len(record.output_hash_ids) > -(-total // size):
        yield f"output_hash_ids: has {len(record.output_hash_ids)} numbers, more than the output has blocks of {size}"


def _reason(error: Exception) -> str:
    """A decoder's error, with the field first."""
    words = str(error)
    if (match := re.fullmatch(r"(.*) - at `\$\.?(.*?)`", words)) is not None:
        field = match[2] or "line"
        return f"{field}: {match[1][0].lower()}{match[1][1:]}"
    if (match := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", words)) is not None:
        return f"{match[2]}: {'it is missing' if match[1].startswith('missing') else 'there is no such field'}"
    return f"is not a JSON object of a trace: {words}"
