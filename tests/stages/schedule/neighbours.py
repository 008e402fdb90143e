"""The neighbours of the schedule stage in its rig."""

import time
from collections import defaultdict

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.shm.arrays import ShmRef
from tests.fakes import FakeExecutor
from tests.rig import PATIENCE_S, Rig, raw

FACTS = m.ExecuteFacts(num_blocks=512, block_size=16, max_model_len=4096, vocab_size=997)


class Neighbours:
    """Plays ingest, execute and detokenize around a schedule stage."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.executor = FakeExecutor(
            FACTS.num_blocks, take=lambda array, dtype: np.frombuffer(self._bytes(array), dtype).copy()
        )
        self.releases: list[tuple[int, int]] = []
        self.opened: dict[int, m.Open] = {}
        self.received: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, int] = {}
        self.compute_s = self.wait_s = 0.0
        """The executor's facts about its steps."""

    def _bytes(self, array: m.Array) -> bytes:
        if isinstance(array, ShmRef):
            self.releases.append((array.offset, array.generation))
        return self.rig.bytes_of(array)

    def admit(self, request_id: int, prompt: list[int], max_tokens: int = 6, n: int = 1, gateway: int = 1) -> None:
        """`gateway` is the incarnation of the gateway."""
        ids = self.rig.arena("ingest.0").put(np.array(prompt, np.int32).tobytes(), readers=("schedule.0",))
        options = raw(m.GenerationOptions(n=n, max_tokens=max_tokens))
        admit = m.Admit(request_id, 1, 0, float(request_id), ids, options, gateway_incarnation=gateway)
        self.rig.send(admit, "ingest.0")

    def step(self) -> m.Step:
        step: m.Step = self.rig.receive("execute", m.Step)
        result = msgspec.structs.replace(self.executor.run(step), compute_s=self.compute_s, wait_s=self.wait_s)
        self.rig.send(result, "execute.0")
        return step

    def until_finished(self, num_sequences: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while len(self.finished) < num_sequences:
            assert time.monotonic() < end, f"only {self.finished} have finished"
            if not self.rig.nothing("execute", 0):
                self.step()
            if not self.rig.nothing("detokenize", 0.001):
                self.detokenize()

    def detokenize(self) -> None:
        match self.rig.receive("detokenize"):
            case m.Open() as opening:
                self.opened[opening.seq] = opening
            case m.Settled() as settled:
                ids = np.frombuffer(self._bytes(settled.ids), np.int32).tolist()
                seqs = np.frombuffer(self._bytes(settled.seqs), np.uint64).tolist()
                counts = np.frombuffer(self._bytes(settled.counts), np.int32).tolist()
                finishes = np.frombuffer(self._bytes(settled.finishes), np.uint8).tolist()
                for seq, num, finish in zip(seqs, counts, finishes, strict=True):
                    assert seq not in self.finished, "an entry came after the closing"
                    self.received[seq] += ids[:num]
                    ids = ids[num:]
                    if finish:
                        self.finished[seq] = finish
