"""Launches from logits to ids, at the sizes of models."""

import torch

from pipeline.kernels.triton.rows import NUM_FIELDS
from pipeline.kernels.triton.sampling.logits_processors import LogitsProcessorScratch, apply_logits_processors
from pipeline.kernels.triton.sampling.logprobs import LogprobScratch, given_logprobs, token_logprobs, top_logprobs
from pipeline.kernels.triton.sampling.sample import SamplingScratch, sample

LLAMA, SMOLLM = 128256, 49152


def launches() -> None:
    _sample(LLAMA, filtered=False)
    _sample(LLAMA, filtered=True)
    _shape(LLAMA, with_masks=True)
    _record(LLAMA, 20, keep=True)


def all_launches() -> None:
    for vocab_size in (LLAMA, SMOLLM, 151_669):
        _sample(vocab_size, filtered=False)
        _sample(vocab_size, filtered=True)
        _shape(vocab_size, with_masks=False)
        _shape(vocab_size, with_masks=True)
        _record(vocab_size, 0, keep=False)
        _record(vocab_size, 20, keep=False)
        _record(vocab_size, 1024, keep=True)


def _sample(vocab_size: int, *, filtered: bool) -> None:
    ids, sample_rows = torch.zeros(2, 2, dtype=torch.int32)
    params = torch.zeros(3, NUM_FIELDS, dtype=torch.int32)
    scratch = SamplingScratch(2, vocab_size, "cpu")
    sample(ids, torch.zeros(2, vocab_size), params, sample_rows, sample_rows, scratch, filtered=filtered)


def _shape(vocab_size: int, *, with_masks: bool) -> None:
    words = torch.zeros(2, (vocab_size + 31) // 32, dtype=torch.int32)
    params, sample_rows = torch.zeros(3, NUM_FIELDS, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    list_memory, ids = torch.zeros(64, dtype=torch.int32), torch.zeros(3, 8192, dtype=torch.int32)
    masks, masked = (words, sample_rows) if with_masks else (None, None)
    scratch = LogitsProcessorScratch(2, vocab_size, "cpu")
    samples = sample_rows, sample_rows
    apply_logits_processors(torch.zeros(2, vocab_size), params, list_memory, ids, *samples, masks, masked, scratch)


def _record(vocab_size: int, max_top: int, *, keep: bool) -> None:
    scratch = LogprobScratch(2, vocab_size, max_top, "cpu", keeps=keep)
    logits, out = torch.zeros(2, vocab_size), torch.zeros(2, 1 + 2 * max_top, dtype=torch.int32)
    ids, num_top = torch.zeros(2, 2, dtype=torch.int32)
    top_logprobs(out, logits, num_top, max_top, scratch, keep=keep)
    if max_top:
        given_logprobs(out, logits, ids[:, None], scratch)
    token_logprobs(out, logits, ids, num_top, scratch)
