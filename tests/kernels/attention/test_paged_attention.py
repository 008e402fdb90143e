"""Rotary positions, KV writes and attention over blocks agree with token-by-token references."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.kernels.attention import paged_attention as kernel
from pipeline.kernels.attention.hadamard import transform_heads
from pipeline.kernels.attention.kv_layout import LayerKV, allocate, dequantize_heads, layers_of, quantize_heads
from pipeline.kernels.attention.paged_attention import AttentionPlan, paged_attention, paged_attention_reference
from pipeline.kernels.attention.rotary import head_norm, rotary_angles, rotary_reference, rotary_write
from pipeline.kernels.rms_norm import rms_norm_reference
from pipeline.kernels.step_inputs import BLOCK_SIZE, StepInputs, block_bytes

HEAD_DIM = 16
DTYPES = [torch.float32, torch.bfloat16]


def make_inputs(
    entries: list[tuple[int, int]], seed: int = 0, num_blocks: int = 200, key_ends: np.ndarray | None = None
) -> StepInputs:
    """Entries are (start, count); block tables are random and share no blocks."""
    rng = np.random.default_rng(seed)
    starts, counts = (np.array(column, np.int32) for column in zip(*entries, strict=True))
    widest = int((-(-(starts + counts) // BLOCK_SIZE)).max())
    tables = rng.permutation(num_blocks)[: len(entries) * widest].reshape(len(entries), widest).astype(np.int32)
    inputs = StepInputs(max_num_tokens=512, max_num_rows=16, max_num_blocks=40, is_causal=key_ends is None)
    ids, samples = rng.integers(0, 100, counts.sum()), np.ones(len(entries), np.uint8)
    inputs.fill(ids, starts, counts, tables, samples, key_ends=key_ends)
    return inputs


def make_kv(num_kv_heads: int, dtype: torch.dtype, seed: int = 0, num_blocks: int = 200) -> LayerKV:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM)
    return LayerKV(*(torch.randn(shape, generator=generator).to(dtype) for _ in range(2)))


def in_8_bits(kv: LayerKV) -> LayerKV:
    """The same in one memory of the allocated layout, quantized."""
    num_blocks, _, num_kv_heads, _ = kv.keys.shape
    (layer,) = layers_of(allocate(1, num_blocks, num_kv_heads, HEAD_DIM, torch.int8, "cpu"), num_kv_heads, HEAD_DIM)
    assert layer.key_scales is not None and layer.value_scales is not None
    for codes, scales, numbers in (
        (layer.keys, layer.key_scales, kv.keys),
        (layer.values, layer.value_scales, kv.values),
    ):
        quantized = quantize_heads(numbers)
        codes.copy_(quantized[0])
        scales.copy_(quantized[1])
    return layer


def test_inputs_contain_the_slot_of_each_token_and_the_sampled_tokens() -> None:
    inputs = StepInputs(max_num_tokens=64, max_num_rows=4, max_num_blocks=8)
    tables = np.array([[5, 6, 7], [1, 2, 3]], np.int32)
    inputs.fill(
        np.arange(4, dtype=np.int32), np.array([40, 15], np.int32), np.array([1, 3], np.int32), tables, np.array([1, 0])
    )
    assert (inputs.num_tokens, inputs.num_rows, inputs.num_samples) == (4, 2, 1)
    assert inputs.ids[:4].tolist() == [0, 1, 2, 3]
    assert inputs.positions[:4].tolist() == [40, 15, 16, 17]
    assert inputs.slots[:4].tolist() == [7 * 16 + 8, 1 * 16 + 15, 2 * 16, 2 * 16 + 1]
    assert inputs.sampled[:1].tolist() == [0]
    assert inputs.offsets[:2].tolist() == [0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_rotary_rotates_queries_in_place_and_writes_keys_and_values_to_their_slots(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int
) -> None:
    inputs = make_inputs([(37, 1), (0, 19), (30, 5)])
    kv = make_kv(num_kv_heads, dtype)
    before = LayerKV(kv.keys.clone(), kv.values.clone())
    frequencies = 1.0 / (100.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    positions = torch.from_numpy(inputs.positions[: inputs.num_tokens])
    slots = torch.from_numpy(inputs.slots[: inputs.num_tokens])
    heads = torch.randn(
        inputs.num_tokens, num_heads + 2 * num_kv_heads, HEAD_DIM, generator=torch.Generator().manual_seed(1)
    ).to(dtype)
    qkv = heads.reshape(inputs.num_tokens, -1).clone()
    cos, sin = torch.empty(2, inputs.num_tokens, HEAD_DIM)
    rotary_angles(cos, sin, positions, frequencies)
    rotary_write(qkv, cos, sin, slots, kv)

    tolerance: dict[str, Any] = (
        {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    )
    turned = rotary_reference(heads[:, : num_heads + num_kv_heads], positions, frequencies)
    queries = qkv.view(heads.shape)[:, :num_heads].double()
    torch.testing.assert_close(queries, turned[:, :num_heads], **tolerance)
    keys, values = kv.keys.flatten(0, 1), kv.values.flatten(0, 1)
    torch.testing.assert_close(keys[slots].double(), turned[:, num_heads:], **tolerance)
    assert torch.equal(values[slots], heads[:, num_heads + num_kv_heads :])
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(keys[untouched], before.keys.flatten(0, 1)[untouched])
    assert torch.equal(values[untouched], before.values.flatten(0, 1)[untouched])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_query_and_key_heads_are_normed_separately_and_values_are_unchanged(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int
) -> None:
    random = torch.Generator().manual_seed(1)
    heads = (torch.randn(7, num_heads + 2 * num_kv_heads, HEAD_DIM, generator=random) * 3).to(dtype)
    query, key = torch.randn(2, HEAD_DIM, generator=random)
    qkv = heads.reshape(7, -1).clone()
    head_norm(qkv, query, key, make_kv(num_kv_heads, dtype), 1e-5)
    tolerance: dict[str, Any] = (
        {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    weights = torch.stack([query] * num_heads + [key] * num_kv_heads)
    out = qkv.view(heads.shape)
    expected = rms_norm_reference(heads[:, :-num_kv_heads], weights, 1e-5)
    torch.testing.assert_close(out[:, :-num_kv_heads].double(), expected, **tolerance)
    assert torch.equal(out[:, -num_kv_heads:], heads[:, -num_kv_heads:])


RAGGED = {
    "one decode": [(40, 1)],
    "decode at a block's first and last place": [(0, 1), (15, 1), (16, 1), (31, 1)],
    "decodes of very different lengths": [(3, 1), (100, 1), (17, 1), (64, 1), (5, 1)],
    "one whole prompt": [(0, 37)],
    "a chunk behind a prefix": [(21, 30)],
    "decodes and chunks": [(50, 1), (33, 1), (0, 20), (16, 16), (7, 2), (0, 1)],
}


def test_quantized_heads_lose_at_most_half_a_code() -> None:
    values = torch.randn(500, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    values *= 10.0 ** torch.linspace(-36, 36, 500)[:, None]
    codes, scales = quantize_heads(values)
    assert codes.dtype == torch.int8 and scales.dtype == torch.bfloat16
    off = (dequantize_heads(codes, scales).double() - values.double()).abs() / scales.double()[:, None]
    assert off.max() <= 0.5 + 1e-4
    tops = values.abs().amax(-1).double() / 127
    assert (scales.double() >= tops * (1 - 1e-6)).all() and (scales.double() <= tops * (1 + 2**-7)).all()
    assert codes.abs().amax(-1).min() >= 126


def test_heads_without_a_scale() -> None:
    """Zeros, numbers that are too small for a scale, ties, and numbers that are not finite."""
    values = torch.zeros(6, HEAD_DIM)
    values[1] = 1e-39
    values[2, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    values[3, 5], values[4, 5], values[5, 5] = torch.nan, torch.inf, -torch.inf
    codes, scales = quantize_heads(values)
    assert not codes[:2].any() and not scales[:2].any()
    assert codes[2, :4].tolist() == [127, 0, 2, -2] and scales[2] == 1
    assert scales[3:].isnan().all()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (3, 1)])
def test_keys_are_quantized_after_rotation_and_the_hadamard_transform(num_heads: int, num_kv_heads: int) -> None:
    inputs = make_inputs([(37, 1), (0, 19), (30, 5)])
    exact = make_kv(num_kv_heads, torch.float32)
    center = 10 * torch.randn(num_kv_heads, HEAD_DIM)
    kv = in_8_bits(exact)
    before = [part.clone() for part in kv if part is not None]
    tokens = slice(0, inputs.num_tokens)
    positions, slots = torch.from_numpy(inputs.positions[tokens]), torch.from_numpy(inputs.slots[tokens])
    qkv = torch.randn(inputs.num_tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM)
    cos, sin = torch.empty(2, inputs.num_tokens, HEAD_DIM)
    rotary_angles(cos, sin, positions, 1.0 / (100.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)))
    same = qkv.clone()
    rotary_write(same, cos, sin, slots, exact)
    rotary_write(qkv, cos, sin, slots, kv if num_heads == num_kv_heads else kv._replace(center=center))
    index = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    queries, others = qkv.view(len(qkv), -1, HEAD_DIM).split([num_heads, 2 * num_kv_heads], 1)
    turned, same_others = same.view(len(qkv), -1, HEAD_DIM).split([num_heads, 2 * num_kv_heads], 1)
    assert torch.equal(queries, transform_heads(turned)) and torch.equal(others, same_others)
    keys = exact.keys[index] if num_heads == num_kv_heads else exact.keys[index] - center
    expected = (*quantize_heads(transform_heads(keys)), *quantize_heads(exact.values[index]))
    for part, numbers in zip((kv.keys, kv.key_scales, kv.values, kv.value_scales), expected, strict=True):
        assert part is not None and torch.equal(part[index], numbers)
    untouched = torch.ones(200, BLOCK_SIZE, dtype=torch.bool)
    untouched[index] = False
    for part, old in zip((kv.keys, kv.values, kv.key_scales, kv.value_scales), before, strict=True):
        assert part is not None and torch.equal(part[untouched], old[untouched])


@pytest.mark.parametrize("quantized", [False, True], ids=["", "8 bits"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize("entries", RAGGED.values(), ids=RAGGED.keys())
def test_attention_agrees_with_its_formula(
    entries: list[tuple[int, int]], window: int | None, dtype: torch.dtype, quantized: bool
) -> None:
    num_heads, num_kv_heads = 6, 2
    inputs, kv = make_inputs(entries, seed=len(entries)), make_kv(num_kv_heads, dtype)
    kv = in_8_bits(kv) if quantized else kv
    for entry, (start, _) in enumerate(entries):  # blocks that the window has left belong to others
        inputs.block_tables[entry, : max(0, start - (window or start + 1) + 1) // BLOCK_SIZE] = 2**30
    qkv = torch.randn(
        inputs.num_tokens, (num_heads + 2 * num_kv_heads) * HEAD_DIM, generator=torch.Generator().manual_seed(2)
    ).to(dtype)
    plan = AttentionPlan(window)
    plan.prepare(inputs)
    out = torch.full((inputs.num_tokens, num_heads * HEAD_DIM), torch.nan, dtype=dtype)
    paged_attention(out, qkv, kv, plan)
    queries = qkv.view(inputs.num_tokens, -1, HEAD_DIM)[:, :num_heads]
    expected = paged_attention_reference(queries, kv, inputs, window)
    tolerance: dict[str, Any] = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    torch.testing.assert_close(out.double().view(expected.shape), expected, **tolerance)


def random_ends(entries: list[tuple[int, int]], window: int | None, seed: int) -> np.ndarray:
    """Any key after the first one that a token's window has."""
    rng, ends = np.random.default_rng(seed), []
    for start, count in entries:
        positions = np.arange(start, start + count)
        firsts = 0 * positions if window is None else np.maximum(positions - window + 1, 0)
        ends.append(rng.integers(firsts + 1, start + count + 1))
    return np.concatenate(ends)


@pytest.mark.parametrize("quantized", [False, True], ids=["", "8 bits"])
@pytest.mark.parametrize(("window", "window_after"), [(None, None), (5, 4), (21, None), (40, 3), (1, 0)])
@pytest.mark.parametrize("entries", RAGGED.values(), ids=RAGGED.keys())
def test_tokens_see_the_keys_before_their_ends(
    entries: list[tuple[int, int]], window: int | None, window_after: int | None, quantized: bool
) -> None:
    """With a window, also none that is further away than it says. What no token of a row sees is not finite."""
    num_heads, num_kv_heads = 6, 2
    whole = np.concatenate([np.full(count, start + count) for start, count in entries])
    biases = torch.randn(num_heads, 2 * 9 + 1, generator=torch.Generator().manual_seed(4))
    for key_ends in (whole, random_ends(entries, window, 5)):
        inputs, kv = make_inputs(entries, len(entries), key_ends=key_ends), make_kv(num_kv_heads, torch.float32)
        spoil_unseen(kv, inputs, window, window_after)
        kv = in_8_bits(kv) if quantized else kv
        width = (num_heads + 2 * num_kv_heads) * HEAD_DIM
        qkv = torch.randn(inputs.num_tokens, width, generator=torch.Generator().manual_seed(2))
        plan = AttentionPlan(window, None, 0, window_after)
        plan.prepare(inputs)
        queries = qkv.view(inputs.num_tokens, -1, HEAD_DIM)[:, :num_heads]
        for added in (None, biases):
            out = torch.full((inputs.num_tokens, num_heads * HEAD_DIM), torch.nan)
            paged_attention(out, qkv, kv, plan, None, added)
            expected = paged_attention_reference(queries, kv, inputs, window, window_after, added)
            torch.testing.assert_close(out.double().view(expected.shape), expected, rtol=1e-5, atol=1e-5)


def spoil_unseen(kv: LayerKV, inputs: StepInputs, window: int | None, window_after: int | None) -> None:
    """Let keys and values that no token sees be NaN."""
    unseen = torch.ones(kv.keys.shape[:2], dtype=torch.bool)
    assert inputs.key_ends is not None
    for entry in range(inputs.num_rows):
        for token in range(inputs.offsets[entry], inputs.offsets[entry] + inputs.counts[entry]):
            position, end = int(inputs.positions[token]), int(inputs.key_ends[token])
            first = 0 if window is None else max(0, position - window + 1)
            seen = np.arange(first, end if window_after is None else min(end, position + 1 + window_after))
            unseen[inputs.block_tables[entry, seen // BLOCK_SIZE], seen % BLOCK_SIZE] = False
    kv.keys[unseen] = torch.nan
    kv.values[unseen] = torch.nan


def test_ends_of_causal_text_change_no_bit() -> None:
    for entries in RAGGED.values():
        kv, outs = make_kv(2, torch.bfloat16), []
        own = np.concatenate([np.arange(start, start + count) + 1 for start, count in entries])
        for key_ends in (None, own):
            inputs, plan = make_inputs(entries, key_ends=key_ends), AttentionPlan(21)
            plan.prepare(inputs)
            width = 10 * HEAD_DIM
            qkv = torch.randn(inputs.num_tokens, width, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
            out = torch.full((inputs.num_tokens, 6 * HEAD_DIM), torch.nan, dtype=torch.bfloat16)
            paged_attention(out, qkv, kv, plan)
            outs.append(out)
        assert torch.equal(*outs)


def test_a_plan_is_reused_by_later_steps() -> None:
    kv, plan = make_kv(1, torch.float32), AttentionPlan(None)
    for entries in ([(0, 9), (30, 1)], [(9, 1)]):
        inputs = make_inputs(entries)
        plan.prepare(inputs)
        qkv = torch.randn(inputs.num_tokens, 3 * HEAD_DIM, generator=torch.Generator().manual_seed(3))
        out = torch.empty(inputs.num_tokens, HEAD_DIM)
        paged_attention(out, qkv, kv, plan)
        expected = paged_attention_reference(qkv[:, None, :HEAD_DIM], kv, inputs, None)
        torch.testing.assert_close(out.double(), expected[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 280])
def test_memory_does_not_grow_with_tokens_times_keys(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """The plan holds a few numbers of each token; keys in float32 are in memory only for a part of the tokens."""
    entries = [(100, 200), *[(299, 1)] * 7]
    inputs, kv, plan = make_inputs(entries), make_kv(1, torch.float32), AttentionPlan(window)
    inputs.block_tables[7] = inputs.block_tables[6]
    plan.prepare(inputs)
    parts = [part for group in plan.groups for part in (group.tokens, group.queries, group.firsts, group.ends)]
    held = [getattr(group, name) for group in plan.groups for name in group.__slots__]
    assert sum(one.numel() for one in held if isinstance(one, torch.Tensor)) == sum(part.numel() for part in parts)
    assert sum(part.numel() for part in parts) == 4 * inputs.num_tokens
    qkv = torch.randn(inputs.num_tokens, 3 * HEAD_DIM, generator=torch.Generator().manual_seed(3))
    gather, live, most, outs = kernel._gathered, weakref.WeakSet[torch.Tensor](), [], []

    def counted(*args: Any) -> Any:
        gathered = gather(*args)
        live.add(gathered.keys)
        most.append(len(live))
        return gathered

    monkeypatch.setattr(kernel, "_gathered", counted)
    for max_scores in (kernel.MAX_SCORES, 2 * 512):
        monkeypatch.setattr(kernel, "MAX_SCORES", max_scores)
        most.clear()
        out = torch.empty(inputs.num_tokens, HEAD_DIM)
        paged_attention(out, qkv, kv, plan)
        outs.append(out)
    assert max(most) == 2, "tokens of a part"
    assert len(plan.spans) == 7, "equal rows share a span"
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_blocks_have_the_declared_size_and_start_as_zeros(dtype: torch.dtype) -> None:
    layers = layers_of(allocate(3, 5, 2, HEAD_DIM, dtype, "cpu"), 2, HEAD_DIM)
    parts = [part for layer in layers for part in layer if part is not None]
    assert sum(part.nbytes for part in parts) == 5 * block_bytes(3, 2, HEAD_DIM, dtype.itemsize)
    assert not any(part.any() for part in parts)


def test_8_bits_hold_nearly_twice_the_tokens_of_bfloat16() -> None:
    assert block_bytes(30, 3, 64, 2) / block_bytes(30, 3, 64, 1) > 1.93
    assert block_bytes(32, 8, 128, 2) / block_bytes(32, 8, 128, 1) > 1.96
