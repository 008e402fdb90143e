"""An executor that computes nothing and answers each step at once with made-up ids. It serves to measure the other
stages without a model: `pipeline serve --instant` and `pipeline profile pipeline`.

Ids depend only on row and step, are words in most vocabularies, and never stop a sequence, so every output has its
maximum length. Logprobs are zeros of the right size. Neither torch nor weights are loaded.
"""

from functools import partial
from typing import assert_never

import msgspec
import numpy as np

from pipeline.replay.open_stage import open_stage
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.process import heap
from pipeline.runtime.stage import Stage
from pipeline.runtime.token_outputs import prompt_logprob_bytes, token_output_bytes
from pipeline.runtime.topology import SCHEDULE

IDLE_S = 60.0
NUM_BLOCKS = 65536
FIRST_ID = 1000
NUM_IDS = 8000


def run(launch: m.Launch) -> None:
    """The stage. Returns after `Stop`."""
    stage: Stage[m.ExecuteInbox]
    with open_stage(launch, m.ExecuteInbox) as stage:
        config = ModelConfig.load(stage.model_dir)
        settings = stage.settings
        max_model_len = config.longest_sequence(settings.max_model_len)
        executor = Instant(settings.schedule.max_num_seqs, config)
        stage.log.warning("the instant executor returns made-up ids and runs no model")
        num_swap_blocks = NUM_BLOCKS if settings.execute.swap_bytes else 0
        block_size, vocab_size = settings.schedule.block_size, config.vocab_size
        facts = m.ExecuteFacts(
            NUM_BLOCKS,
            block_size,
            max_model_len,
            vocab_size,
            num_swap_blocks,
            executor.hidden_size,
            generates=config.generates,
            is_encoder=not config.causal,
        )
        stage.ready(facts)
        while True:
            messages: list[m.ExecuteInbox] = stage.inbox.wait_all(IDLE_S)
            for message in messages:
                match message:
                    case m.Step():
                        result = executor.step(stage, message)
                        if stage.replica == 0:  # the other ranks don't answer
                            sent = stage.outbox("schedule").send(result)
                            assert sent, "the scheduler takes no results"
                    case m.Release():
                        stage.arrays.released(message)
                    case m.PeerRestarted():
                        stage.reconnected(message)
                    case m.Ping(nonce):
                        stage.supervisor.send(m.Pong(nonce, m.PlainLoad(0)))
                    case m.Adapters() | m.ExpectGrammars():
                        pass
                    case m.UseAdapters(incarnation, number, adapter_ids):
                        sent = stage.outbox("schedule").send(m.AdaptersLoaded(incarnation, number, adapter_ids))
                        assert sent, "the scheduler does not accept messages"
                    case m.SaveKV():  # there is none
                        stage.arrays.done_all(message)
                        stage.supervisor.send(m.KVSaved(message.number, 0, 0.0))
                    case m.Start():
                        heap.freeze()
                    case m.Stop():
                        return
                    case _:
                        assert_never(message)
            stage.release()


class Instant:
    """The state of rows: their generations, and the sizes of their logprobs."""

    def __init__(self, max_num_seqs: int, config: ModelConfig) -> None:
        self._generations = np.zeros(max_num_seqs, np.uint32)
        self._first = min(FIRST_ID, config.vocab_size // 2)
        self._num_ids = max(1, min(NUM_IDS, config.vocab_size - self._first))
        self._ends = np.array(config.eos_ids, np.int32)
        self.hidden_size = config.hidden_size if config.pooler is None else config.pooler.width
        self._widths = np.zeros(max_num_seqs, np.int64)
        """Bytes of the logprobs of an id; likewise for the prompt's ids below."""
        self._prompt_widths = np.zeros(max_num_seqs, np.int64)
        self._num_prompt = np.zeros(max_num_seqs, np.int64)
        self._options = msgspec.msgpack.Decoder(m.GenerationOptions)

    def step(self, stage: Stage[m.ExecuteInbox], step: m.Step) -> m.StepResult:
        arrays = stage.arrays
        for add in step.adds:
            self._add(add)
            arrays.done(add.ids)
            arrays.done(add.blocks)
        for array in (step.drops, step.block_rows, step.block_ids):
            arrays.done(array)
        for array in (step.copy_sources, step.copy_targets):
            arrays.done(array)
        put = partial(arrays.put, readers=(SCHEDULE,))
        computed = arrays.take(step.rows, np.int32)
        starts, counts = (arrays.take(array, np.int32) for array in (step.starts, step.counts))
        ends = np.minimum(starts + counts, self._num_prompt[computed] - 1)
        num_prompt_bytes = int((np.maximum(ends - starts, 0) * self._prompt_widths[computed]).sum())
        rows = computed[arrays.take(step.samples, np.uint8) > 0]
        ids = (self._first + (rows * 131 + step.step_id * 17) % self._num_ids).astype(np.int32)
        if np.isin(ids, self._ends).any():
            ids = np.where(np.isin(ids, self._ends), self._first, ids).astype(np.int32)
        return m.StepResult(
            incarnation=step.incarnation,
            step_id=step.step_id,
            rows=put(rows),
            generations=put(self._generations[rows]),
            ids=put(ids),
            finishes=bytes(len(rows)),
            compute_s=0.0,
            wait_s=0.0,
            token_outputs=put(np.zeros(int(self._widths[rows].sum()), np.uint8)),
            prompt_logprobs=put(np.zeros(num_prompt_bytes, np.uint8)),
        )

    def _add(self, add: m.RowAdd) -> None:
        row, options = add.row, self._options.decode(add.options)
        self._generations[row] = add.generation
        self._num_prompt[row] = add.num_prompt
        self._prompt_widths[row] = prompt_logprob_bytes(options) if add.index == 0 else 0
        self._widths[row] = token_output_bytes(options, self.hidden_size, add.num_prompt)
