"""Launches from logits to ids, at the sizes of models."""

import torch

from pipeline.kernels.triton.draw import DrawScratch, draw
from pipeline.kernels.triton.rows import NUM_FIELDS

LLAMA, SMOLLM = 128256, 49152


def launches() -> None:
    _draw(LLAMA, filtered=False)


def all_launches() -> None:
    for vocab_size in (LLAMA, SMOLLM, 151_669):
        _draw(vocab_size, filtered=False)


def _draw(vocab_size: int, *, filtered: bool) -> None:
    ids, sample_rows = torch.zeros(2, 2, dtype=torch.int32)
    params = torch.zeros(3, NUM_FIELDS, dtype=torch.int32)
    draw(ids, torch.zeros(2, vocab_size), params, sample_rows, DrawScratch(2, vocab_size, "cpu"), filtered=filtered)
