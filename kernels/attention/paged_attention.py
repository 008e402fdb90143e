"""Attention of a step's queries over keys and values in blocks: causal, or up to `StepInputs.key_ends`; optionally with
a sliding window.

A token is computed in one form, whatever else its step computes: two matmuls of each KV head over the blocks that it
sees, padded to a power of two. So its numbers depend on its row's keys and values and on its position, but not on the
other rows, nor on how a prompt is cut into chunks. `AttentionPlan.prepare` computes once per step what depends only on
lengths and block tables, and every layer uses it. What grows with tokens times keys is made for a part of the tokens at
a time, of at most `MAX_SCORES` scores; so are the keys and values that they see, in float32.

Keys that a token must not see don't count, whatever bits are there: their scores are replaced, and their values too if
any of them is NaN or infinite. Otherwise 0 * NaN would make the token NaN.

Keys, values and queries are computed with in float32.

With a window of W, position i attends to the positions j with i - W < j <= i; earlier blocks are not read. With key
ends, it attends to those before its own end, and with a window also to `window_after` ones after it at most.

Shapes: T tokens, B tokens that see as many blocks, Q query heads, K key-value heads, D head_dim, L keys.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.attention.kv_layout import LayerKV, dequantize_heads
from pipeline.kernels.row_by_row import row_by_row
from pipeline.kernels.step_inputs import BLOCK_SIZE, LongArray, StepInputs

ALIGNMENT = 16
"""Numbers to which the queries of a token are padded, because a matmul's bits may depend on its operands' alignment."""

MAX_SCORES = 1 << 22
"""Scores that are in memory at once, as far as one token doesn't have more."""


@dataclass(frozen=True, slots=True)
class _Span:
    """The keys of an entry that any of its tokens sees."""

    blocks: Tensor
    """int64"""
    num_keys: int
    num_padded: int
    """With the zeros behind them, which pad the number of its tokens' keys to powers of two."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Tokens with the same padded number of keys."""

    tokens: Tensor
    """[B] int64; their indices in the step"""
    locations: list[tuple[int, int]]
    """[B]; of each token, its span and its first key there"""
    num_keys: int
    queries: Tensor
    """[B, 1, 1, 1] int64; of each token, its own key, counted from its first one"""
    firsts: Tensor
    """[B, 1, 1, 1] int64; the first key that it sees, counted in the same way"""
    ends: Tensor
    """[B, 1, 1, 1] int64; the first key after these that it does not see"""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How scores differ from queries x keys / sqrt(D)."""

    scale: float | None = None
    """Instead of 1 / sqrt(D)."""
    softcap: float | None = None
    """c in c * tanh(score / c)."""
    slopes: Tensor | None = None
    """[Q]; what is subtracted for each position that a key is away from the query (ALiBi: Press et al., 2021,
    arXiv:2108.12409)."""
    has_sinks: bool = False


class AttentionPlan:
    """The plan of one step's attention. `prepare` updates it in place for each step."""

    def __init__(
        self, window: int | None, form: ScoreOptions | None = None, group: int = 0, window_after: int | None = None
    ) -> None:
        """`group` is the KV group whose block tables it reads."""
        self.group = group
        self.window, self.window_after = window, window_after
        self.form = form or ScoreOptions()
        self.spans: list[_Span] = []
        self.groups: list[_Group] = []

    def prepare(self, inputs: StepInputs) -> None:
        """Plan the step in `inputs`."""
        num_rows, positions = inputs.num_rows, inputs.positions[: inputs.num_tokens]
        starts, counts = inputs.starts[:num_rows], inputs.counts[:num_rows]
        firsts = np.zeros_like(positions) if self.window is None else np.maximum(0, positions - self.window + 1)
        first_blocks = firsts // BLOCK_SIZE
        key_ends = self._key_ends(inputs, positions)
        num_blocks = -(-key_ends // BLOCK_SIZE) - first_blocks
        padded = BLOCK_SIZE << np.ceil(np.log2(num_blocks)).astype(np.int64)
        entries = np.repeat(np.arange(num_rows), counts)
        bases = first_blocks[inputs.offsets[:num_rows]] * BLOCK_SIZE
        offsets = first_blocks * BLOCK_SIZE - bases[entries]
        most = np.zeros(num_rows, np.int64)
        np.maximum.at(most, entries, offsets + padded)
        self.spans = []
        spans: dict[tuple[bytes, int, int], int] = {}
        span_of = []  # of each entry; those with the same keys share one
        ends = starts + counts if inputs.key_ends is None else np.maximum.reduceat(key_ends, inputs.offsets[:num_rows])
        for entry, (base, end, num_padded) in enumerate(zip(bases, ends, most, strict=True)):
            blocks = inputs.group_tables[self.group][entry, base // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
            key = (blocks.tobytes(), int(end - base), int(num_padded))
            if key not in spans:
                spans[key] = len(self.spans)
                self.spans.append(_Span(torch.from_numpy(blocks.astype(np.int64)), *key[1:]))
            span_of.append(spans[key])
        token_spans = np.array(span_of, np.int64)[entries]
        self.groups = []
        for num_keys in np.unique(padded).tolist():
            tokens = np.flatnonzero(padded == num_keys)
            begins = first_blocks[tokens].astype(np.int64) * BLOCK_SIZE
            self.groups.append(
                _Group(
                    torch.from_numpy(tokens),
                    list(zip(token_spans[tokens].tolist(), offsets[tokens].tolist(), strict=True)),
                    num_keys,
                    torch.from_numpy(positions[tokens] - begins).view(-1, 1, 1, 1),
                    torch.from_numpy(firsts[tokens] - begins).view(-1, 1, 1, 1),
                    torch.from_numpy(key_ends[tokens] - begins).view(-1, 1, 1, 1),
                )
            )

    def _key_ends(self, inputs: StepInputs, positions: LongArray) -> LongArray:
        """The first key that each token does not see."""
        if inputs.key_ends is None:
            return positions + 1
        ends = inputs.key_ends[: inputs.num_tokens].astype(np.int64)
        return ends if self.window_after is None else np.minimum(ends, positions + 1 + self.window_after)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Keys and values of a span."""

    keys: Tensor
    """[K, D, L] float32"""
    values: Tensor
    """[K, L, D] float32"""
    are_finite: bool
    """Whether all values are."""


def paged_attention(
    out: Tensor,
    qkv: Tensor,
    kv: LayerKV,
    plan: AttentionPlan,
    sinks: Tensor | None = None,
    biases: Tensor | None = None,
) -> None:
    """Attend from the step's queries to their rows' keys and values, which must all be in the cache.

    out [T, Q * D]; qkv [T, (Q + 2K) * D], where only queries are read; sinks [Q] float32: a score of each head that
    takes part in the softmax, without a value; biases [Q, 2R + 1] float32: what is added to scores by the distance from
    the query to the key, at least -R and at most R (T5: Raffel et al., 2020, arXiv:1910.10683).
    """
    num_kv_heads, head_dim = kv.keys.shape[2:]
    width = out.shape[1]
    spans: dict[int, _Gathered] = {}
    for group in plan.groups:
        at_once = max(1, MAX_SCORES // (width // head_dim * group.num_keys))
        for begin in range(0, len(group.locations), at_once):
            part = slice(begin, begin + at_once)
            needed = {span for span, _ in group.locations[part]}
            spans = {span: gathered for span, gathered in spans.items() if span in needed}
            for span in needed - spans.keys():
                spans[span] = _gathered(kv, plan.spans[span])
            tokens = group.tokens[part]
            queries = qkv.new_zeros(len(tokens), -(-width // ALIGNMENT) * ALIGNMENT, dtype=torch.float32)
            queries[:, :width] = qkv[tokens, :width]
            heads = [query[:width].view(num_kv_heads, -1, head_dim) for query in queries]
            attended = _attend(heads, spans, group, part, plan.form, sinks, biases)
            out[tokens] = attended.view(len(tokens), width).to(out.dtype)


def _attend(
    queries: list[Tensor],
    spans: dict[int, _Gathered],
    group: _Group,
    part: slice,
    form: ScoreOptions,
    sinks: Tensor | None,
    biases: Tensor | None,
) -> Tensor:
    """The attention of a part of a group's tokens, whose queries [K, Q / K, D] are float32. Returns [B, K, Q / K, D].

    The matmuls are those of one token each. Everything else is exact or row by row."""
    locations, keys = group.locations[part], torch.arange(group.num_keys)
    hidden = (keys >= group.ends[part]) | (keys < group.firsts[part])
    num_kv_heads, num_grouped, head_dim = queries[0].shape
    scores = torch.stack(
        [
            torch.bmm(query, spans[span].keys[:, :, first : first + group.num_keys])
            for query, (span, first) in zip(queries, locations, strict=True)
        ]
    )
    scores *= head_dim**-0.5 if form.scale is None else form.scale
    if form.softcap is not None:
        scores = form.softcap * row_by_row(torch.tanh, scores / form.softcap)
    if form.slopes is not None:
        scores -= form.slopes.view(num_kv_heads, num_grouped, 1) * (group.queries[part] - keys).abs().float()
    if biases is not None:
        reach = biases.shape[1] // 2
        distances = (keys - group.queries[part]).clamp(-reach, reach).view(len(scores), -1)
        scores += biases[:, distances + reach].transpose(0, 1).view(scores.shape)
    scores.masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.float().view(num_kv_heads, num_grouped, 1)
        scores = torch.cat([scores, extra.expand(len(scores), -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : group.num_keys].contiguous()
    attended = []
    for token, (span, first) in enumerate(locations):
        values = spans[span].values[:, first : first + group.num_keys]
        if not spans[span].are_finite:
            values = _without(values, hidden[token, 0, 0])
        attended.append(torch.bmm(weights[token], values))
    return torch.stack(attended)


def _without(values: Tensor, hidden: Tensor) -> Tensor:
    """Values [K, L, D] in the same layout, with zeros for the keys [L] that are hidden."""
    return values.transpose(0, 1).masked_fill(hidden[:, None, None], 0).transpose(0, 1)


def _gathered(kv: LayerKV, span: _Span) -> _Gathered:
    """Zeros are behind the span's own keys: what is there in the last block is an earlier row's."""
    keys, values = kv.keys.index_select(0, span.blocks), kv.values.index_select(0, span.blocks)
    if kv.key_scales is not None and kv.value_scales is not None:
        keys = dequantize_heads(keys, kv.key_scales.index_select(0, span.blocks))
        values = dequantize_heads(values, kv.value_scales.index_select(0, span.blocks))
    padded = []
    for numbers in (keys, values):
        wide = torch.empty(span.num_padded, *numbers.shape[2:])
        wide[: span.num_keys] = numbers.flatten(0, 1)[: span.num_keys]
        wide[span.num_keys :] = 0
        padded.append(wide)
    # The smallest and the largest are NaN if any is.
    are_finite = all(bool(bound.isfinite()) for bound in torch.aminmax(padded[1]))
    return _Gathered(padded[0].permute(1, 2, 0), padded[1].transpose(0, 1), are_finite)


def paged_attention_reference(
    queries: Tensor,
    kv: LayerKV,
    inputs: StepInputs,
    window: int | None,
    window_after: int | None = None,
    biases: Tensor | None = None,
) -> Tensor:
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
            end = position + 1
            if inputs.key_ends is not None:
                end = min(int(inputs.key_ends[token]), end + (2**31 if window_after is None else window_after))
            table = inputs.block_tables[entry]
            seen = [(int(table[j // BLOCK_SIZE]), j % BLOCK_SIZE) for j in range(first, end)]
            for head in range(num_heads):
                keys = torch.stack([kv.keys[block, offset, head // group] for block, offset in seen]).double()
                values = torch.stack([kv.values[block, offset, head // group] for block, offset in seen]).double()
                scores = keys @ queries[token, head].double() / head_dim**0.5
                if biases is not None:
                    reach = biases.shape[1] // 2
                    distances = torch.arange(first, end) - position
                    scores += biases[head, distances.clamp(-reach, reach) + reach]
                out[token, head] = torch.softmax(scores, 0) @ values
    return out
