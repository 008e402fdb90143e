"""What detokenize receives of a scheduler, checked for ids and records that are lost, repeated or wrong."""

import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.runtime.token_outputs import prompt_logprob_bytes, token_output_bytes
from tests.fakes import expected, inline, record


class Received:
    """Everything that the replicas of detokenize would have received."""

    def __init__(self, num_detokenize: int, max_model_len: int) -> None:
        self.num_detokenize = num_detokenize
        self._max_model_len = max_model_len
        self.opened: dict[int, m.Open] = {}
        self.received: dict[int, list[int]] = {}
        self.token_outputs: dict[int, bytes] = {}
        self.prompts: dict[int, bytes] = {}
        self.errors: dict[int, str] = {}
        self.finished: dict[int, Finish] = {}
        self.admitted: dict[int, tuple[m.Admit, m.GenerationOptions]] = {}
        self.drafts: dict[int, tuple[int, int]] = {}
        """Accepted and rejected ids of each sequence that has them counted."""
        self.begun: set[int] = set()
        """Sequences whose first sampled ids were reported with their times."""

    def given(self, seq: int) -> int:
        """The number of output ids that a sequence was resumed with."""
        admit, _ = self.admitted[seq]
        return len(inline(admit.outputs[self.opened[seq].index])) // 4 if admit.outputs else 0

    def receive(self, message: m.Settled, replica: int) -> None:
        """Take a message to a replica. Raises AssertionError if it does not continue what came before."""
        ids = np.frombuffer(inline(message.ids), np.int32).tolist()
        seqs = np.frombuffer(inline(message.seqs), np.uint64).tolist()
        for first in message.firsts:
            assert seqs[first.index] not in self.begun, "a sequence has two first ids"
            self.begun.add(seqs[first.index])
        for counts in message.drafts:
            self.drafts[seqs[counts.index]] = counts.num_accepted, counts.num_rejected
        for seq, start, data in zip(message.prompt_seqs, message.prompt_starts, message.prompt_logprobs, strict=True):
            assert seq not in self.finished, "prompt records came after the closing"
            width = prompt_logprob_bytes(self.admitted[seq][1])
            assert start * width == len(self.prompts[seq]) and len(data) % width == 0
            self.prompts[seq] += data
        token_outputs, errors = inline(message.token_outputs), iter(message.errors)
        for seq, start, num, finish in zip(
            np.frombuffer(inline(message.seqs), np.uint64).tolist(),
            np.frombuffer(inline(message.starts), np.int32).tolist(),
            np.frombuffer(inline(message.counts), np.int32).tolist(),
            np.frombuffer(inline(message.finishes), np.uint8).tolist(),
            strict=True,
        ):
            assert seq % self.num_detokenize == replica, "a sequence belongs to one replica"
            assert seq not in self.finished, "an entry came after the closing"
            assert start == len(self.received[seq]), "ids were lost or repeated"
            self.received[seq] += ids[:num]
            ids = ids[num:]
            num_bytes = num * token_output_bytes(self.admitted[seq][1], hidden_size=0)
            self.token_outputs[seq] += token_outputs[:num_bytes]
            token_outputs = token_outputs[num_bytes:]
            if finish != Finish.NONE:
                self.finished[seq] = Finish(finish)
            if finish == Finish.ERROR:
                self.errors[seq] = next(errors)
        assert not ids and not token_outputs and next(errors, None) is None
        assert self.begun == {seq for seq in self.received if len(self.received[seq]) > self.given(seq)}

    def check_outputs(self) -> None:
        """Every finished sequence has exactly its ids; an aborted one has a prefix of them."""
        for seq, finish in self.finished.items():
            message, options = self.admitted[seq]
            prompt = np.frombuffer(inline(message.prompt_ids), np.int32).tolist()
            assert options.max_tokens is not None
            limit = min(options.max_tokens, self._max_model_len - len(prompt))
            index = self.opened[seq].index
            ids, natural = expected(prompt, options, index, limit)
            if any(fails := [token_id in options.bias_ids for token_id in ids]):
                ids, natural = ids[: fails.index(True)], Finish.ERROR
            if options.num_logprobs >= 0:
                assert self.token_outputs[seq] == b"".join(
                    record(one, options.num_logprobs) for one in self.received[seq]
                )
            prompt_logprobs = b""
            if options.num_prompt_logprobs >= 0 and index == 0:
                prompt_logprobs = b"".join(record(one, options.num_prompt_logprobs) for one in prompt[1:])
            assert self.prompts[seq] == prompt_logprobs or (
                not self.received[seq] and prompt_logprobs.startswith(self.prompts[seq])
            )
            assert (finish == Finish.ERROR) == (seq in self.errors)
            if finish == Finish.ABORT:
                assert self.received[seq] == ids[: len(self.received[seq])]
            else:
                assert (self.received[seq], finish) == (ids, natural)
