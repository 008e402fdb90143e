"""Sampling for steps with grammar masks, logits processors or logprobs.

    logits ──► top logprobs ──► masks, logits processors ──► sample ──► logprobs of the ids

The launches for logprobs are not captured in a graph, because they differ from step to step. Without logprobs, masks,
logits processors and sampling are one graph (graphs/step_graphs.py).
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.sampling.logits_processor_inputs import num_words
from pipeline.kernels.sampling.logprob_inputs import NO_LOGPROBS
from pipeline.kernels.step_inputs import IntArray, LongArray
from pipeline.kernels.triton.rows import StepArrays
from pipeline.kernels.triton.sampling import logprobs
from pipeline.kernels.triton.sampling.logits_processors import LogitsProcessorScratch, apply_logits_processors
from pipeline.kernels.triton.sampling.logprobs import LogprobScratch
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.graphs.step_graphs import SamplerKind, StepGraphs
from pipeline.stages.execute.cuda.launched_step import PendingLogprobs
from pipeline.stages.execute.cuda.model.device_model import DeviceModel, HiddenStates
from pipeline.stages.execute.cuda.rows.batches import Batch
from pipeline.stages.execute.cuda.rows.device_rows import DeviceRows
from pipeline.stages.execute.grammar_masks.masks import LATE_MS, Masks
from pipeline.stages.execute.prompt_logprobs import prompt_token_indices
from pipeline.stages.execute.rows import RowTable

PADDING_ROW = -1
"""Stands for a row that needs no mask."""
SPIN_S = 1e-3
"""For so long, the waits for grammar masks and for the ids that they need do not sleep, because waking up takes 60 µs.
They yield their core to any process that wants it."""
POLL_S = 50e-6
"""Poll interval for grammar masks that take longer."""


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Masks that the mask process is computing."""

    rows: IntArray
    """[N]; the rows that are sampled"""
    entry: LongArray
    """[S]; of each sample, its place in `rows`"""
    samples: LongArray
    """First samples of the rows that will have a mask."""


class SamplingExtras:
    """Owned by the runner."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        steps: StepGraphs,
        rows: DeviceRows,
        masks: Masks,
        max_num_samples: int,
        max_num_top: int,
    ) -> None:
        self._device, self._model, self._step_graphs, self._rows = device, model, steps, rows
        self._max_num_samples = max_num_samples
        vocab_size = model.logits.shape[1]
        self._masks = torch.zeros(max_num_samples, num_words(vocab_size), dtype=torch.int32, device=device.where)
        self._masked = torch.zeros(max_num_samples, dtype=torch.int32, device=device.where)
        """1 for a sample with a mask."""
        self._masked_on_host = device.pinned(max_num_samples, torch.int32)
        if not device.lock(masks.words.view(np.uint8)):
            logging.getLogger("pipeline").warning(
                "grammar masks can't be pinned for the GPU: copying them blocks steps"
            )
        self._logits_scratch = LogitsProcessorScratch(max_num_samples, vocab_size, device.where)
        self._logprob_scratch = LogprobScratch(max_num_samples, vocab_size, max_num_top, device.where)
        self._max_num_top = max_num_top
        steps.apply_processors = self.apply_processors

    def compile(self) -> None:
        """Make all launches for logprobs. For `Device.compiling`."""
        logits = self._model.logits[:1]
        # Kernels are compiled for few of the likeliest, and for as many as there can be.
        variants: list[tuple[int, list[IntArray]]] = [(num_top, []) for num_top in sorted({0, self._max_num_top})]
        for num_top, given in [*variants, (1, [np.zeros(1, np.int32)])]:
            for keep in (False, True):
                builder = _LogprobBuilder(self._device, np.array([num_top], np.int32), self._logprob_scratch, given)
                builder.note(logits, keep=keep)
                builder.complete(self._logprob_scratch.kept if keep else logits, self._step_graphs.sampled_ids[:1], 1)

    def apply_processors(self, step: StepArrays, has_masks: bool) -> None:
        """Apply the rows' logits processors, and the masks on the device, to the model's logits."""
        num, on_device = step.num_samples, self._rows.on_device
        apply_logits_processors(
            self._model.logits[:num],
            on_device.params,
            self._rows.list_memory,
            on_device.ids,
            *(step.sample_rows, step.num_known),
            self._masks[:num] if has_masks else None,
            self._masked[:num] if has_masks else None,
            self._logits_scratch,
        )

    def request_masks(self, masks: Masks, rows: IntArray, num_drafts: LongArray, table: RowTable) -> MaskRequest:
        """Request masks for sampling `rows`, each also after each of its `num_drafts` proposed ids.

        The host must know all ids of the rows. The GPU computes their logits meanwhile.
        """
        # A row that has ended needs no mask, and may have ended because its mask can't be computed.
        running = np.where(table.ended[rows], PADDING_ROW, rows)
        drafts = num_drafts if num_drafts.any() else None
        samples = masks.request(running, table.ids, table.num_ids, drafts)
        return MaskRequest(rows, np.repeat(np.arange(len(rows)), 1 + num_drafts), samples)

    def send_masks(self, masks: Masks, request: MaskRequest, num_samples: int) -> dict[int, str]:
        """Wait for the requested masks and enqueue their copies to the device, for `num_samples` with padding. Returns
        the errors of rows whose mask can't be computed: no id is sampled for those.

        The masks on the host are overwritten by the next request, and the flags by the next call. Both follow the end
        of this step, because they need its ids.
        """
        spin_until_s = time.monotonic() + SPIN_S
        end_s = spin_until_s + LATE_MS / 1000
        while not masks.is_done():
            now_s = time.monotonic()
            if now_s > end_s:
                masks.wait()
            elif now_s > spin_until_s:
                time.sleep(POLL_S)
            else:
                os.sched_yield()
        entry, rows, words = request.entry, request.rows, masks.words[: len(request.entry)]
        masked = self._masked_on_host.numpy()[:num_samples]
        masked[:] = 0
        if len(entry) == len(rows):
            masked[request.samples] = 1
        else:
            masked[: len(entry)] = np.isin(entry, entry[request.samples])
        errors: dict[int, str] = {}
        for sample, why in masks.take_failed().items():
            its = np.flatnonzero(entry == entry[sample])
            words[its], masked[its] = 0, 1
            errors[int(rows[entry[sample]])] = why
        self._device.copy(self._masks[: len(words)], torch.from_numpy(words.view(np.int32)))
        self._device.copy(self._masked[:num_samples], self._masked_on_host[:num_samples])
        return errors

    def sample_with_logprobs(
        self, rows: IntArray, step: StepArrays, table: RowTable, kind: SamplerKind
    ) -> PendingLogprobs:
        """Sample ids for `rows`, one for each sample, from the model's logits, and append them to the rows as `kind`
        says. Returns the requested logprobs. Steps without any have a captured sampler."""
        logits = self._model.logits[: step.num_samples]
        num_top = np.full(step.num_samples, NO_LOGPROBS, np.int32)
        num_top[: len(rows)] = table.num_logprobs[rows]
        given = [table.logprob_token_ids[row] for row in rows.tolist()]
        builder = _LogprobBuilder(self._device, num_top, self._logprob_scratch, given)
        builder.note(logits, keep=kind.has_processors)
        self._step_graphs.sample_as(kind, step)
        ids = self._step_graphs.sampled_ids[: step.num_samples]
        return builder.complete(self._logprob_scratch.kept if kind.has_processors else logits, ids, len(rows))

    def score_prompts(self, batch: Batch, table: RowTable, hidden_states: HiddenStates) -> list[PendingLogprobs]:
        """Logprobs of the prompt ids that follow the step's tokens; see stages/execute/prompt_logprobs.py.

        Overwrites the step's logits.
        """
        token_indices, ids, num_top = prompt_token_indices(table, batch.rows, batch.starts, batch.counts, batch.offsets)
        made = []
        for begin in range(0, len(token_indices), self._max_num_samples):
            part = slice(begin, begin + self._max_num_samples)
            logits = self._model.score(hidden_states, self._device.send(token_indices[part].astype(np.int32)))
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
            for index, each in enumerate(given):
                ids[index, : len(each)] = each
                num_likeliest[index] = num_top[index] if not len(each) else 0
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
