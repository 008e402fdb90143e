"""Causal attention of a step's queries over keys and values in blocks, optionally with a sliding window.

A step has entries of one token (decode) and of many (chunks). `AttentionPlan.prepare` computes once per step what
depends only on lengths and block tables, and every layer uses it:

    decode  entries of similar length are one group: their blocks are gathered into [B, L, K, D], padded to the
            longest, and one call computes the group
    chunk   each entry separately, over its own blocks

Keys and values in 8 bits are dequantized to float32 after they are gathered, and queries are computed with in float32.

With a window of W, position i attends to the positions j with i - W < j <= i; earlier blocks are not read.

Shapes: T tokens, B entries, Q query heads, K key-value heads, D head_dim, L keys.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.kernels.kv_layout import LayerKV, dequantize_heads
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray, StepInputs


@dataclass(frozen=True, slots=True)
class _Decode:
    tokens: Tensor
    """[B] int64; indices of their tokens in the batch"""
    blocks: Tensor
    """[B * L / BLOCK_SIZE] int64"""
    mask: Tensor
    """[B, 1, 1, L]; 0 for keys to attend to, else -inf"""
    distances: Tensor
    """[B, 1, L] float32; positions from a key to the query"""


@dataclass(frozen=True, slots=True)
class _Chunk:
    begin: int
    end: int
    """The end of its tokens in the batch."""
    blocks: Tensor
    num_keys: int
    mask: Tensor | None
    """[end - begin, num_keys] bool, or None if the mask is only causal"""
    distances: Tensor | None
    """[end - begin, num_keys] float32; positions from a key to a query; None if the scores don't need them"""


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """How scores differ from queries x keys / sqrt(D)."""

    scale: float | None = None
    """Instead of 1 / sqrt(D)."""
    softcap: float | None = None
    """c in c * tanh(score / c)."""
    slopes: Tensor | None = None
    """[Q]; what is subtracted for each position that a key is before the query (ALiBi: Press et al., 2021,
    arXiv:2108.12409)."""
    has_sinks: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether torch's attention computes them."""
        return self.softcap is None and self.slopes is None and not self.has_sinks


class AttentionPlan:
    """The plan of one step's attention. `prepare` updates it in place for each step."""

    def __init__(self, window: int | None, dtype: torch.dtype, form: ScoreForm | None = None, group: int = 0) -> None:
        """`group` is the KV group whose block tables it reads."""
        self.group = group
        self.window = window
        self.dtype = dtype
        self.form = form or ScoreForm()
        self.decodes: list[_Decode] = []
        self.chunks: list[_Chunk] = []

    def prepare(self, inputs: StepInputs) -> None:
        """Plan the step in `inputs`."""
        starts, counts = inputs.starts[: inputs.num_rows], inputs.counts[: inputs.num_rows]
        firsts = np.zeros_like(starts) if self.window is None else np.maximum(0, starts - self.window + 1)
        single = counts == 1
        # Powers of two: at most half of a gathered group is padding, and there are few groups.
        num_blocks = starts // BLOCK_SIZE + 1 - firsts // BLOCK_SIZE
        sizes = np.where(single, np.ceil(np.log2(num_blocks)).astype(np.int32), -1)
        self.decodes = [self._decode(inputs, np.flatnonzero(sizes == size), firsts) for size in set(sizes[single])]
        self.chunks = [self._chunk(inputs, int(entry), int(firsts[entry])) for entry in np.flatnonzero(~single)]

    def _decode(
        self, inputs: StepInputs, entries: "np.ndarray[tuple[int], np.dtype[np.intp]]", firsts: IntArray
    ) -> _Decode:
        last = inputs.starts[entries]
        first = firsts[entries]
        first_block = first // BLOCK_SIZE
        num_blocks = last // BLOCK_SIZE + 1 - first_block
        steps = np.arange(num_blocks.max())
        index = np.minimum(first_block[:, None] + steps, (last // BLOCK_SIZE)[:, None])
        blocks = inputs.group_tables[self.group][entries[:, None], index]
        keys = first_block[:, None] * BLOCK_SIZE + np.arange(len(steps) * BLOCK_SIZE)
        hidden = torch.from_numpy((keys > last[:, None]) | (keys < first[:, None]))
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf)
        return _Decode(
            torch.from_numpy(inputs.offsets[entries].astype(np.int64)),
            torch.from_numpy(blocks.reshape(-1).astype(np.int64)),
            mask[:, None, None],
            torch.from_numpy((last[:, None] - keys).astype(np.float32))[:, None],
        )

    def _chunk(self, inputs: StepInputs, entry: int, first: int) -> _Chunk:
        start, count = int(inputs.starts[entry]), int(inputs.counts[entry])
        begin = int(inputs.offsets[entry])
        first_block = first // BLOCK_SIZE
        base, end = first_block * BLOCK_SIZE, start + count
        blocks = inputs.group_tables[self.group][entry, first_block : -(-end // BLOCK_SIZE)]
        queries = torch.arange(start, end)[:, None]
        keys = torch.arange(base, end)[None]
        mask: Tensor | None = None
        if start > 0 or (self.window is not None and count > self.window):
            mask = keys <= queries
            if self.window is not None:
                mask &= keys > queries - self.window
        distances: Tensor | None = None
        if not self.form.is_plain:
            distances = (queries - keys).float()
            mask = keys <= queries if mask is None else mask
        return _Chunk(begin, begin + count, torch.from_numpy(blocks.astype(np.int64)), end - base, mask, distances)


def paged_attention(out: Tensor, qkv: Tensor, kv: LayerKV, plan: AttentionPlan, sinks: Tensor | None = None) -> None:
    """Attend from the step's queries to their rows' keys and values, which must all be in the cache.

    out [T, Q * D]; qkv [T, (Q + 2K) * D], where only queries are read; sinks [Q] float32: a score of each head that
    takes part in the softmax, without a value. The plan's form must say that there are sinks.
    """
    form = plan.form
    is_plain = form.is_plain
    _, _, num_kv_heads, head_dim = kv.keys.shape
    heads_out = out.view(len(out), -1, head_dim)
    num_heads = heads_out.shape[1]
    queries = qkv.view(len(qkv), -1, head_dim)[:, :num_heads]
    for group in plan.decodes:
        num = len(group.tokens)
        # The queries of a key-value head are rows of one matmul, so that the group reads its keys once.
        query = queries.index_select(0, group.tokens).view(num, num_kv_heads, -1, head_dim)
        gathered = _gathered(kv, group.blocks)
        keys, values = (each.view(num, -1, num_kv_heads, head_dim).transpose(1, 2) for each in gathered)
        query = query.to(keys.dtype)
        if is_plain:
            mask = group.mask.to(keys.dtype)
            attended = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=form.scale)
        else:
            attended = _attend(query, keys, values, group.mask, group.distances, form, sinks)
        heads_out.index_copy_(0, group.tokens, attended.reshape(num, num_heads, head_dim).to(out.dtype))
    for chunk in plan.chunks:
        keys, values = (each.view(-1, num_kv_heads, head_dim)[: chunk.num_keys] for each in _gathered(kv, chunk.blocks))
        query = queries[chunk.begin : chunk.end].transpose(0, 1)[None].to(keys.dtype)
        if is_plain:
            attended = scaled_dot_product_attention(
                query,
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                enable_gqa=True,
                scale=form.scale,
            )[0]
        else:
            assert chunk.mask is not None and chunk.distances is not None
            mask = torch.zeros(chunk.mask.shape).masked_fill_(~chunk.mask, -torch.inf)
            group_size = num_heads // num_kv_heads
            grouped = query.view(num_kv_heads, group_size, *query.shape[2:])
            attended = _attend(
                grouped,
                keys.transpose(0, 1)[:, None],
                values.transpose(0, 1)[:, None],
                mask,
                chunk.distances,
                form,
                sinks,
            ).view(num_heads, *query.shape[2:])
        heads_out[chunk.begin : chunk.end] = attended.transpose(0, 1)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    distances: Tensor,
    form: ScoreForm,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with capped or biased scores, or with sinks, in float32. `query` is [B, K, group, D] for one token
    each, or [K, group, tokens, D] for the tokens of a chunk; `distances` [B, 1, L] or [tokens, L]."""
    scale = query.shape[-1] ** -0.5 if form.scale is None else form.scale
    scores = query.float() @ keys.float().transpose(-1, -2) * scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    if form.slopes is not None:
        if distances.dim() == 3:  # one token each: heads are [K, group]
            slopes = form.slopes.view(scores.shape[1], scores.shape[2], 1)
            scores = scores - slopes * distances[:, None]
        else:
            slopes = form.slopes.view(scores.shape[0], scores.shape[1], 1, 1)
            scores = scores - slopes * distances
    scores = scores + mask
    if sinks is not None:
        num_kv_heads = scores.shape[1] if distances.dim() == 3 else scores.shape[0]
        heads = sinks.float().view(num_kv_heads, -1, 1)
        extra = heads if distances.dim() == 3 else heads[..., None]
        scores = torch.cat([scores, extra.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(query.dtype)


def _gathered(kv: LayerKV, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of some blocks, [blocks, BLOCK_SIZE, K, D]."""
    keys, values = kv.keys.index_select(0, blocks), kv.values.index_select(0, blocks)
    if kv.key_scales is None or kv.value_scales is None:
        return keys, values
    scales = kv.key_scales.index_select(0, blocks), kv.value_scales.index_select(0, blocks)
    return dequantize_heads(keys, scales[0]), dequantize_heads(values, scales[1])


def paged_attention_reference(queries: Tensor, kv: LayerKV, inputs: StepInputs, window: int | None) -> Tensor:
    """The formula in float64, a token and a head at a time. queries [T, Q, D]; returns [T, Q, D]."""
    num_heads, head_dim = queries.shape[1:]
    group = num_heads // kv.keys.shape[2]
    if kv.key_scales is not None and kv.value_scales is not None:
        kv = LayerKV(dequantize_heads(kv.keys, kv.key_scales), dequantize_heads(kv.values, kv.value_scales))
    out = torch.zeros(queries.shape, dtype=torch.float64)
    for entry in range(inputs.num_rows):
        for step in range(int(inputs.counts[entry])):
            token, position = int(inputs.offsets[entry]) + step, int(inputs.starts[entry]) + step
            first = 0 if window is None else max(0, position - window + 1)
            seen = [
                (int(inputs.block_tables[entry, j // BLOCK_SIZE]), j % BLOCK_SIZE) for j in range(first, position + 1)
            ]
            for head in range(num_heads):
                keys = torch.stack([kv.keys[block, place, head // group] for block, place in seen]).double()
                values = torch.stack([kv.values[block, place, head // group] for block, place in seen]).double()
                scores = keys @ queries[token, head].double() / head_dim**0.5
                out[token, head] = torch.softmax(scores, 0) @ values
    return out
