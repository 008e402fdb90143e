"""Sampling for steps with grammar masks, logits processors or logprobs.

    logits ──► top logprobs ──► masks, logits processors ──► sample ──► logprobs of the ids

These launches are not captured in a graph, because they differ from step to step.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.logprob_inputs import NO_LOGPROBS
from pipeline.kernels.step_inputs import IntArray, LongArray
from pipeline.kernels.triton.rows import StepArrays
from pipeline.kernels.triton.sampling import logprobs
from pipeline.kernels.triton.sampling.logits_processors import LogitsProcessorScratch, apply_logits_processors
from pipeline.kernels.triton.sampling.logprobs import LogprobScratch
from pipeline.stages.execute.cuda.batches import Batch
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.graphs import StepGraphs
from pipeline.stages.execute.cuda.launched_step import PendingLogprobs
from pipeline.stages.execute.cuda.model import DeviceModel, HiddenStates
from pipeline.stages.execute.cuda.rows import DeviceRows
from pipeline.stages.execute.grammar_masks.masks import LATE_MS, Masks
from pipeline.stages.execute.prompt_logprobs import prompt_places
from pipeline.stages.execute.rows import RowTable
from pipeline.stages.execute.sampling_features import SamplingFeature

PADDING_ROW = -1
"""Stands for a row that needs no mask."""
POLL_S = 50e-6
"""Poll interval for grammar masks."""


@dataclass(frozen=True, slots=True)
class DeviceMasks:
    """Grammar masks on the device."""

    words: Tensor
    """[samples, ceil(V / 32)] int32"""
    flags: Tensor
    """[samples with padding] int32; 1 for a row with a mask"""


class SamplingExtras:
    """Owned by the runner."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        steps: StepGraphs,
        rows: DeviceRows,
        max_num_samples: int,
        max_num_top: int,
    ) -> None:
        self._device, self._model, self._step_graphs, self._rows = device, model, steps, rows
        self._max_num_samples = max_num_samples
        vocab_size = model.logits.shape[1]
        self._logits_scratch = LogitsProcessorScratch(max_num_samples, vocab_size, device.where)
        self._logprob_scratch = LogprobScratch(max_num_samples, vocab_size, max_num_top, device.where)
        self._max_num_top = max_num_top

    def warm(self, step: StepArrays) -> Iterator[None]:
        """Compile all kernels, one variant at each iteration, with padding samples. `step` are the arrays of a captured
        step. No step may be in flight."""
        logits, on_device = self._model.logits[:1], self._rows.on_device
        num_words = -(-logits.shape[1] // 32)
        masks = self._device.send(np.zeros((1, num_words), np.int32)), self._device.send(np.zeros(1, np.int32))
        for words, flags in ((None, None), masks):
            samples, known = step.sample_rows[:1].fill_(len(on_device.params) - 1), step.num_known[:1]
            apply_logits_processors(
                logits,
                on_device.params,
                self._rows.list_memory,
                on_device.ids,
                *(samples, known),
                words,
                flags,
                self._logits_scratch,
            )
            yield
        # Kernels are compiled for few of the likeliest, and for as many as there can be.
        variants: list[tuple[int, list[IntArray]]] = [(num_top, []) for num_top in sorted({0, self._max_num_top})]
        for num_top, given in [*variants, (1, [np.zeros(1, np.int32)])]:
            for keep in (False, True):
                builder = _LogprobBuilder(self._device, np.array([num_top], np.int32), self._logprob_scratch, given)
                builder.note(logits, keep=keep)
                builder.complete(self._logprob_scratch.kept if keep else logits, self._step_graphs.sampled_ids[:1], 1)
                yield

    def mask(
        self, masks: Masks, rows: IntArray, num_drafts: LongArray, table: RowTable, num_samples: int
    ) -> tuple[DeviceMasks, dict[int, str]]:
        """Masks for sampling `rows`, each also after each of its `num_drafts` proposed ids; and the errors of rows
        whose mask can't be computed: no id is sampled for those. `num_samples` includes padding.

        The host must know all ids of the rows. The GPU computes their logits meanwhile.
        """
        # A row that has ended needs no mask, and may have ended because its mask can't be computed.
        running = np.where(table.ended[rows], PADDING_ROW, rows)
        drafts = num_drafts if num_drafts.any() else None
        places = masks.request(running, table.ids, table.num_ids, drafts)
        num_each = 1 + num_drafts
        entry = np.repeat(np.arange(len(rows)), num_each)
        end_s = time.monotonic() + LATE_MS / 1000
        while not masks.is_done():
            if time.monotonic() > end_s:
                masks.wait()
            else:
                time.sleep(POLL_S)
        failed = masks.take_failed()
        words, flags = masks.words[: len(entry)].copy(), np.zeros(num_samples, np.int32)
        flags[: len(entry)] = np.isin(entry, entry[places])
        for place in failed:
            its = np.flatnonzero(entry == entry[place])
            words[its], flags[its] = 0, 1
        masked = DeviceMasks(self._device.send(words.view(np.int32)), self._device.send(flags))
        return masked, {int(rows[entry[place]]): why for place, why in failed.items()}

    def sample(
        self,
        rows: IntArray,
        step: StepArrays,
        table: RowTable,
        masked: DeviceMasks | None,
        *,
        filtered: bool,
        verifies: bool = False,
    ) -> PendingLogprobs | None:
        """Sample ids for `rows`, one for each sample, from the model's logits. Append them to the rows unless the host
        `verifies` them. Returns logprobs, if requested."""
        logits, requested_features = self._model.logits[: step.num_samples], table.requested_features
        shapes = bool(requested_features & (SamplingFeature.LOGITS_PROCESSORS | SamplingFeature.GRAMMAR_MASK))
        num_top = np.full(step.num_samples, NO_LOGPROBS, np.int32)
        num_top[: len(rows)] = table.num_logprobs[rows]
        builder: _LogprobBuilder | None = None
        if requested_features & SamplingFeature.LOGPROBS and (num_top >= 0).any():
            given = [table.logprob_token_ids[row] for row in rows.tolist()]
            builder = _LogprobBuilder(self._device, num_top, self._logprob_scratch, given)
            builder.note(logits, keep=shapes)
        if shapes:
            on_device = self._rows.on_device
            apply_logits_processors(
                *(logits, on_device.params, self._rows.list_memory, on_device.ids, step.sample_rows, step.num_known),
                *(None if masked is None else masked.words, None if masked is None else masked.flags),
                self._logits_scratch,
            )
        self._step_graphs.sample(logits, step, filtered=filtered)
        self._step_graphs.finish(step, verifies=verifies)
        if builder is None:
            return None
        ids = self._step_graphs.sampled_ids[: step.num_samples]
        return builder.complete(self._logprob_scratch.kept if shapes else logits, ids, len(rows))

    def score_prompts(self, batch: Batch, table: RowTable, hidden_states: HiddenStates) -> list[PendingLogprobs]:
        """Logprobs of the prompt ids that follow the step's tokens; see stages/execute/prompt_logprobs.py.

        Overwrites the step's logits.
        """
        places, ids, num_top = prompt_places(table, batch.rows, batch.starts, batch.counts, batch.offsets)
        made = []
        for begin in range(0, len(places), self._max_num_samples):
            part = slice(begin, begin + self._max_num_samples)
            logits = self._model.score(hidden_states, self._device.send(places[part].astype(np.int32)))
            builder = _LogprobBuilder(self._device, num_top[part], self._logprob_scratch)
            builder.note(logits, keep=False)
            made.append(builder.complete(logits, self._device.send(ids[part]), len(ids[part])))
        return made


class _LogprobBuilder:
    """Logprobs that are being computed on the device."""

    def __init__(
        self, device: Device, num_top: IntArray, scratch: LogprobScratch, given: Sequence[IntArray] = ()
    ) -> None:
        """`num_top` [M] is the number of top logprobs of each, -1 for no record. `given`: the ids that a record has
        instead of the likeliest, if there are any; the first entries of M."""
        self._device, self._scratch, self._num_top = device, scratch, num_top
        width = 1 + 2 * max(0, int(num_top.max()))
        self._words = torch.zeros((len(num_top), width), dtype=torch.int32, device=device.where)
        self._given: Tensor | None = None
        num_likeliest = num_top.copy()
        if num_given := max(map(len, given), default=0):
            ids = np.full((len(num_top), num_given), -1, np.int32)
            for place, each in enumerate(given):
                ids[place, : len(each)] = each
                num_likeliest[place] = num_top[place] if not len(each) else 0
            self._given = device.send(ids)
        self._max_likeliest = int(num_likeliest.max())
        self._num_likeliest = device.send(num_likeliest)

    def note(self, logits: Tensor, *, keep: bool) -> None:
        """Compute what does not depend on the sampled id; with `keep`, copy the logits, because they will change."""
        logprobs.top_logprobs(
            self._words, logits, self._num_likeliest, max(0, self._max_likeliest), self._scratch, keep=keep
        )
        if self._given is not None:
            logprobs.given_logprobs(self._words, logits, self._given, self._scratch)

    def complete(self, logits: Tensor, ids: Tensor, num: int) -> PendingLogprobs:
        """Compute the logprobs of `ids`, and enqueue the copy of the first `num` records to the host."""
        logprobs.token_logprobs(self._words, logits, ids, self._num_likeliest, self._scratch)
        return PendingLogprobs(self._device.fetch(self._words[:num]), self._num_top[:num])
