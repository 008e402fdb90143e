"""What a stream has received of its sequences: where a repeated request continues, and which of its output is new."""

import msgspec

from pipeline.client import protocol as p
from pipeline.client.errors import ConnectionLost

ID_BYTES = 4
ABORT = "abort"


class SequenceReceived:
    """What has been received of one sequence."""

    __slots__ = ("finish_reason", "ids", "num_chars")

    def __init__(self, ids: bytes = b"") -> None:
        self.ids = bytearray(ids)
        """int32, little-endian"""
        self.num_chars: int | None = None if ids else 0
        """Characters of its text; None if the caller has got them from another stream."""
        self.finish_reason: str | None = None

    @property
    def num_ids(self) -> int:
        return len(self.ids) // ID_BYTES


class ReceivedOutput:
    """What has been received of all sequences and of the prompt's log probabilities."""

    def __init__(self, request: p.Generate, num_top: int | None) -> None:
        """`num_top` is the number of alternatives in a record of an output id; None without records."""
        params = request.request
        n = params.n or 1
        given = request.received or [b""] * n
        self.sequences = [SequenceReceived(ids) for ids in given]
        self._num_top = num_top
        self._prompt_record_bytes = None if params.prompt_logprobs is None else ID_BYTES + 8 * params.prompt_logprobs
        self._num_prompt_records = 0
        self._is_whole_only = bool(params.use_beam_search) or (params.best_of or n) > n

    @property
    def num_ids(self) -> int:
        """Output ids of all sequences."""
        return sum(one.num_ids for one in self.sequences)

    @property
    def has_all_ends(self) -> bool:
        return all(one.finish_reason is not None for one in self.sequences)

    def is_whole(self, num_prompt_ids: int) -> bool:
        """Whether nothing is missing except `finished`."""
        if not self.has_all_ends:
            return False
        is_aborted = any(one.finish_reason == ABORT for one in self.sequences)
        return is_aborted or not self._lacks_prompt_records(num_prompt_ids)

    def new(self, delta: p.Delta) -> p.Delta:
        """The part of a delta that was not received before. Raises ConnectionLost if something between is missing."""
        if self._prompt_record_bytes is not None and delta.prompt_records:
            end = delta.prompt_record_offset + len(delta.prompt_records) // self._prompt_record_bytes
            self._num_prompt_records = max(self._num_prompt_records, end)
        outputs = [output for each in delta.outputs if (output := self._new_output(each)) is not None]
        return delta if outputs == delta.outputs else msgspec.structs.replace(delta, outputs=outputs)

    def _new_output(self, output: p.Output) -> p.Output | None:
        if not 0 <= output.index < len(self.sequences):
            raise ConnectionLost(f"the server sent output of sequence {output.index} of {len(self.sequences)}")
        have = self.sequences[output.index]
        if have.finish_reason is not None:
            return None
        num_chars = output.text_offset if have.num_chars is None else have.num_chars
        old_ids, old_chars = have.num_ids - output.token_offset, num_chars - output.text_offset
        if old_ids < 0 or old_chars < 0:
            raise ConnectionLost(
                f"the request can't be continued: of sequence {output.index}, {have.num_ids} ids and {num_chars} "
                f"characters were received, and the server went on after {output.token_offset} ids and "
                f"{output.text_offset} characters"
            )
        if old_ids or old_chars:
            output = self._without(output, old_ids, old_chars)
        have.ids += output.token_ids
        have.num_chars = num_chars + len(output.text)
        have.finish_reason = output.finish_reason
        return output if output.text or output.token_ids or output.finish_reason else None

    def _without(self, output: p.Output, num_ids: int, num_chars: int) -> p.Output:
        """An output without its first ids and characters, which were received before."""
        records, pieces = output.records, output.pieces
        if self._num_top is not None:
            records = records[num_ids * (ID_BYTES + 8 * self._num_top) :]
            pieces = pieces[num_ids * (1 + self._num_top) :]
        return msgspec.structs.replace(
            output,
            text=output.text[num_chars:],
            token_ids=output.token_ids[num_ids * ID_BYTES :],
            text_offset=output.text_offset + num_chars,
            token_offset=output.token_offset + num_ids,
            records=records,
            pieces=pieces,
        )

    def on_the_wire(self, num_prompt_ids: int) -> list[bytes]:
        """`received` of the repeated request."""
        if self._is_whole_only:  # the server sends all or nothing
            return []
        each = [bytes(one.ids) for one in self.sequences]
        if each and self.sequences[0].finish_reason is not None and self._lacks_prompt_records(num_prompt_ids):
            each[0] = b""  # they are computed with this sequence, unless it is complete
        return each if any(each) else []

    def aborted(self, request_id: int) -> p.Delta:
        """What ends the sequences that are open."""
        return p.Delta(
            request_id,
            [
                p.Output(index, "", b"", one.num_chars or 0, one.num_ids, ABORT)
                for index, one in enumerate(self.sequences)
                if one.finish_reason is None
            ],
        )

    def _lacks_prompt_records(self, num_prompt_ids: int) -> bool:
        return self._prompt_record_bytes is not None and self._num_prompt_records < num_prompt_ids - 1
