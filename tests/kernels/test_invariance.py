"""Torch ops give a row the same bits in any batch, and keys that must not be seen don't count."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.kernels import activations, logits, rms_norm, silu_mul
from pipeline.kernels.attention import rotary
from pipeline.kernels.attention.kv_layout import LayerKV
from pipeline.kernels.attention.paged_attention import AttentionPlan, ScoreOptions, paged_attention
from pipeline.kernels.experts import ExpertActivation, ExpertMatrices, RouteOptions, add_gated, experts, route
from pipeline.kernels.linear import ROWS, linear, linear_upcast
from pipeline.kernels.row_by_row import row_by_row
from pipeline.kernels.sampling.logprobs import log_softmax
from pipeline.kernels.sampling.noise import halves
from pipeline.kernels.sampling.sample import sample
from pipeline.kernels.step_inputs import BLOCK_SIZE
from tests.kernels.attention.test_paged_attention import HEAD_DIM, RAGGED, in_8_bits, make_inputs, make_kv

DTYPES = [torch.float32, torch.bfloat16]
COUNTS = (1, 2, 3, 15, 16, 17, 64, 97, 200)
WIDTHS = (7, 48, 577, 1537)
MATRICES = [(960, 576), (576, 1536), (257, 129), (48, 33), (100, 7), (1024, 4096), (3001, 64)]
"""Of SmolLM2 and of Llama 3 8B, and odd ones."""


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def check(op: Callable[[Tensor], Tensor], x: Tensor, counts: tuple[int, ...] = COUNTS) -> None:
    """`op` of each row alone equals that of the row among others."""
    alone = torch.cat([op(x[i : i + 1].clone()) for i in range(max(counts))])
    assert alone.float().std() > 0
    for num in counts:
        found = op(x[:num].clone())
        assert torch.equal(found, alone[:num]), f"{num} rows: {int((found != alone[:num]).sum())} numbers differ"


def into(op: Callable[..., None], width: int, dtype: torch.dtype, *others: Any) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        out = torch.empty(len(x), width, dtype=dtype)
        op(out, x, *others)
        return out

    return run


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), MATRICES)
def test_matmuls(num_outputs: int, num_inputs: int, dtype: torch.dtype, biased: bool) -> None:
    counts = (1, 2, 5, 16, 17, 40)
    x, weight = random(40, num_inputs, dtype=dtype), random(num_outputs, num_inputs, dtype=dtype, seed=1)
    bias = random(num_outputs, dtype=dtype, seed=2) if biased else None
    check(into(linear, num_outputs, dtype, weight, bias), x, counts)
    if dtype == torch.bfloat16:
        check(into(linear_upcast, num_outputs, dtype, weight, bias), x, counts)


@pytest.mark.parametrize("op", [linear, linear_upcast])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), MATRICES)
def test_a_row_is_the_same_at_each_place_of_a_matmul(op: Any, num_outputs: int, num_inputs: int) -> None:
    """Also beside rows that are not finite."""
    for dtype in DTYPES if op is linear else [torch.bfloat16]:
        weight = random(num_outputs, num_inputs, dtype=dtype, seed=1)
        row, found = random(num_inputs, dtype=dtype), []
        for index in range(ROWS):
            x = random(ROWS, num_inputs, dtype=dtype, seed=2 + index)
            x[(index + 3) % ROWS] = (torch.nan, torch.inf, 3.3e38)[index % 3]
            x[index] = row
            found.append(into(op, num_outputs, dtype, weight, None)(x)[index])
        assert found[0].isfinite().all() and all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [logits.logits, logits.logits_upcast])
def test_logits(op: Any, dtype: torch.dtype) -> None:
    if op is logits.logits or dtype == torch.bfloat16:
        weight = random(5003, 96, dtype=dtype, seed=1)
        check(into(op, 5003, torch.float32, weight), random(20, 96, dtype=dtype), (1, 2, 16, 17, 20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
class TestRows:
    def test_norms(self, width: int, dtype: torch.dtype) -> None:
        x, weight, bias = random(200, width, scale=3), random(width, seed=1), random(width, seed=2)
        check(into(rms_norm.rms_norm, width, dtype, weight, 1e-5), x)
        check(into(rms_norm.layer_norm, width, dtype, weight, bias, 1e-5), x)

    @pytest.mark.parametrize("kind", activations.ACTIVATIONS)
    def test_activations(self, width: int, dtype: torch.dtype, kind: str) -> None:
        x = random(200, 2 * width, dtype=dtype, scale=3)
        check(into(activations.activate, 2 * width, dtype, kind), x)
        check(into(activations.activate_mul, width, dtype, kind), x)
        if kind == "silu":
            check(into(silu_mul.silu_mul, width, dtype), x)
            check(ExpertActivation("swiglu_oai", alpha=1.7, limit=2.0).apply, x)

    def test_sums_with_a_factor(self, width: int, dtype: torch.dtype) -> None:
        def added(x: Tensor) -> Tensor:
            out = x.float() * 0.3
            rms_norm.add(out, x, 0.22)
            return out

        def capped(x: Tensor) -> Tensor:
            out = x.float()
            rms_norm.softcap(out, 5.0)
            return out

        x = random(200, width, dtype=dtype, scale=3)
        check(added, x)
        check(capped, x)

    def test_gates(self, width: int, dtype: torch.dtype) -> None:
        def gated(x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            add_gated(out, x, x[:, -5:])
            return out

        check(gated, random(200, width, dtype=dtype, scale=3))


def test_angles_and_growing_queries() -> None:
    kv = make_kv(1, torch.float32)
    for angle in (0, 1):

        def angles(positions: Tensor, angle: int = angle) -> Tensor:
            tables = torch.empty(2, len(positions), 14)
            rotary.rotary_angles(
                tables[0], tables[1], positions, torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001])
            )
            return tables[angle]

        check(angles, torch.arange(200) * 37)

    def grown(positions: Tensor) -> Tensor:
        qkv = torch.ones(len(positions), 3 * HEAD_DIM)
        rotary.scale_queries(qkv, positions, kv, 0.1, 3)
        return qkv

    check(grown, torch.arange(200))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts(scoring: str, dtype: torch.dtype) -> None:
    num, width, inner = 6, 40, 24
    matrices = ExpertMatrices(
        random(num, 2 * inner, width, dtype=dtype, seed=1) / 8, random(num, width, inner, dtype=dtype, seed=2) / 8
    )
    router = random(num, width, dtype=dtype, seed=3)
    for normalized in (False, True):

        def run(x: Tensor, normalized: bool = normalized) -> Tensor:
            scores = into(linear, num, dtype, router, None)(x)
            chosen, weights = torch.empty(len(x), 3, dtype=torch.int64), torch.empty(len(x), 3)
            route(chosen, weights, scores, None, RouteOptions(num, scoring, normalized))
            out = torch.empty(len(x), width, dtype=dtype)
            experts(out, x, chosen, weights, matrices, ExpertActivation("silu"), linear)
            return torch.cat([out.float(), weights], 1)

        check(run, random(100, width, dtype=dtype), (1, 2, 17, 64, 100))


def test_samples_and_logprobs() -> None:
    keys = halves(np.arange(40, dtype=np.uint64) * 0x9E3779B97F4A7C15)
    numbers = torch.cat([random(40, 40_003, scale=4), torch.arange(40.0)[:, None]], 1)

    def drawn(x: Tensor) -> Tensor:
        rows = x[:, -1].long()
        temperature = 0.5 + rows / 20
        filters = rows % 3 * 20, 1 - rows % 2 * 0.1, (rows % 5 == 0) * 0.01
        return sample(x[:, :-1], temperature, *filters, keys[rows])

    check(drawn, numbers, (1, 2, 5, 40))
    check(lambda x: row_by_row(log_softmax, x), numbers, (1, 2, 5, 40))


FORMS = {
    "plain": ScoreOptions(),
    "scaled": ScoreOptions(scale=0.3),
    "capped": ScoreOptions(softcap=1.5),
    "slopes": ScoreOptions(slopes=torch.tensor([0.5, 0.05, 0.2, 0.01, 0.3, 0.1])),
    "sinks": ScoreOptions(has_sinks=True),
}
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -0.5])
HEADS, KV_HEADS = 6, 2


def attend(
    entries: list[tuple[int, int]], tables: np.ndarray, qkv: Tensor, kv: LayerKV, window: int | None, form: ScoreOptions
) -> Tensor:
    """qkv are those of each entry's tokens, one after the other."""
    inputs = make_inputs(entries)
    inputs.group_tables[0, : len(entries), : tables.shape[1]] = tables
    plan = AttentionPlan(window, form)
    plan.prepare(inputs)
    out = torch.full((len(qkv), HEADS * HEAD_DIM), torch.nan, dtype=qkv.dtype)
    paged_attention(out, qkv, kv, plan, SINKS if form.has_sinks else None)
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize("window", [None, 5, 21, 40])
def test_attention_is_the_same_for_any_chunks_and_neighbours(form: str, dtype: torch.dtype, window: int | None) -> None:
    rng = np.random.default_rng(1)
    quantized, dtype = dtype == torch.int8, torch.bfloat16 if dtype == torch.int8 else dtype
    lengths = [1, 16, 17, 70, 131]
    kv = make_kv(KV_HEADS, dtype)
    kv = in_8_bits(kv) if quantized else kv
    tables = rng.permutation(200)[: len(lengths) * 10].reshape(len(lengths), 10)
    qkv = [
        random(length, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype, seed=i, scale=2)
        for i, length in enumerate(lengths)
    ]
    alone = [
        torch.cat(
            [attend([(at, 1)], tables[i : i + 1], qkv[i][at : at + 1], kv, window, FORMS[form]) for at in range(length)]
        )
        for i, length in enumerate(lengths)
    ]
    done = [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        rows = [i for i, length in enumerate(lengths) if done[i] < length and rng.random() < 0.8]
        rng.shuffle(rows)
        counts = [int(min(lengths[i] - done[i], rng.choice([1, 1, 2, 15, 16, 33, 90]))) for i in rows]
        if not rows:
            continue
        entries = [(done[i], count) for i, count in zip(rows, counts, strict=True)]
        parts = [qkv[i][at : at + count] for i, (at, count) in zip(rows, entries, strict=True)]
        found = attend(entries, tables[rows], torch.cat(parts), kv, window, FORMS[form]).split(counts)
        for i, (at, count), part in zip(rows, entries, found, strict=True):
            assert torch.equal(part, alone[i][at : at + count]), (i, at, count)
            done[i] += count


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stale", [torch.nan, torch.inf, -torch.inf, 3.3e38])
@pytest.mark.parametrize("window", [None, 5, 21])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_unseen_keys_and_values_do_not_count(form: str, stale: float, window: int | None, dtype: torch.dtype) -> None:
    """In other blocks, behind a row's last token and before its window."""
    quantized, dtype = dtype == torch.int8, torch.bfloat16 if dtype == torch.int8 else dtype
    for entries in RAGGED.values():
        inputs = make_inputs(entries, seed=len(entries))
        kv = make_kv(KV_HEADS, dtype)
        kv = in_8_bits(kv) if quantized else kv
        tables = inputs.group_tables[0, : len(entries)].copy()
        seen = torch.zeros(len(kv.keys), BLOCK_SIZE, dtype=torch.bool)
        for entry, (start, count) in enumerate(entries):
            first = 0 if window is None else max(0, start - window + 1)
            for key in range(first, start + count):
                seen[tables[entry, key // BLOCK_SIZE], key % BLOCK_SIZE] = True
        qkv = random(inputs.num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype, seed=2)
        clean = attend(entries, tables, qkv, kv, window, FORMS[form])
        for numbers in (kv.key_scales, kv.value_scales) if quantized else (kv.keys, kv.values):
            assert numbers is not None
            numbers[~seen] = stale
        assert clean.isfinite().all()
        assert torch.equal(attend(entries, tables, qkv, kv, window, FORMS[form]), clean)


@pytest.mark.parametrize("stale", [torch.nan, torch.inf, 3.3e38])
@pytest.mark.parametrize("window", [None, 5])
def test_later_tokens_of_a_chunk_do_not_count(stale: float, window: int | None) -> None:
    """Otherwise a prompt that overflows would spoil the blocks that it shares with others."""
    entries, tables, kv = [(3, 40)], np.arange(3)[None], make_kv(KV_HEADS, torch.float32)
    qkv = random(40, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    clean = attend(entries, tables, qkv, kv, window, FORMS["plain"])
    kv.keys.view(-1, KV_HEADS, HEAD_DIM)[30:34] = stale
    kv.values.view(-1, KV_HEADS, HEAD_DIM)[30:34] = stale
    spoilt = attend(entries, tables, qkv, kv, window, FORMS["plain"])
    assert torch.equal(spoilt[: 30 - 3], clean[: 30 - 3])
    if window is not None:
        assert torch.equal(spoilt[34 + window - 1 - 3 :], clean[34 + window - 1 - 3 :])
    assert not torch.equal(spoilt[30 - 3 :], clean[30 - 3 :])
