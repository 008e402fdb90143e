"""The ops of mixtures of experts in the CPU library, for every instruction set."""

import ctypes

import numpy as np
import pytest
import torch

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.experts import RouteOptions, route_reference
from tests.kernels.cpu.quantized import EPS, random
from tests.kernels.cpu.recording import assert_near, recording

NUM, CHOSEN, WIDTH = 21, 5, 530
FORMS = [
    RouteOptions(NUM, "softmax", False),
    RouteOptions(NUM, "softmax", True, 0.5),
    RouteOptions(NUM, "sigmoid", False),
    RouteOptions(NUM, "sigmoid", True, 2.5),
    RouteOptions(NUM, "sigmoid", True, 2.5, num_groups=3, groups_per_token=1),
    RouteOptions(NUM, "softmax", False, num_groups=7, groups_per_token=3),
    RouteOptions(NUM, "softmax", True, num_groups=3, groups_per_token=2, best_of_group=1),
    RouteOptions(NUM, "softmax", True, factors=torch.linspace(0.5, 2, NUM)),
    RouteOptions(NUM, "sigmoid", True, softcap=1.5),
    RouteOptions(NUM, "softmax", False, softcap=1.5),
]


def expert_order(chosen: list[list[int]]) -> dict[tuple[int, int], int]:
    """The row of each token's choices."""
    pairs = sorted((expert, token) for token, experts in enumerate(chosen) for expert in experts)
    rows = {pair: row for row, pair in enumerate(pairs)}
    return {(token, index): rows[e, token] for token, experts in enumerate(chosen) for index, e in enumerate(experts)}


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_are_routed_gathered_and_combined(
    library: ctypes.CDLL, form: RouteOptions, has_bias: bool, num_tokens: int
) -> None:
    logits = random(1, num_tokens, NUM + 1, scale=3)
    logits[0, :NUM] = 1.0  # all equal: the first experts come first
    bias = random(2, NUM) if has_bias else None
    chosen, weights = route_reference(
        torch.from_numpy(logits[:, :NUM]), CHOSEN, None if bias is None else torch.from_numpy(bias), form
    )
    rows = expert_order(chosen)
    num_rows = num_tokens * CHOSEN
    # Parts are what is gathered, so both must have the rows of the same tokens and experts.
    values, shared, residual = random(3, num_tokens, WIDTH), random(4, num_tokens, WIDTH), random(5, num_tokens, WIDTH)
    with recording(library, threads=2) as r:
        source, target, out = r.floats(values), r.floats(np.full((num_rows, WIDTH), np.nan)), r.floats(residual)
        added = r.floats(shared)
        gathered = (native.NativeGatheredRows * 1)()
        gathered[0].source = native.NativeRows(source.ctypes.data, WIDTH * 4)
        gathered[0].target = native.NativeRows(target.ctypes.data, WIDTH * 4)
        gathered[0].bytes = WIDTH * 4
        bias_at = None if bias is None else r.floats(bias).ctypes.data
        groups = form.num_groups, form.groups_per_token, form.best_of_group
        factors = None if form.factors is None else r.floats(form.factors.numpy()).ctypes.data
        route_form = native.NativeRouteOptions(
            native.SCORINGS[form.scoring], form.normalized, form.scale, bias_at, *groups, factors, form.softcap
        )
        stored = r.floats(logits)
        routing = library.program_route(
            r.program, stored.ctypes.data, NUM + 1, ctypes.byref(route_form), NUM, CHOSEN, 64, gathered, 1
        )
        expert = native.NativeSharedExpert(added.ctypes.data, stored.ctypes.data + 4 * NUM, NUM + 1)
        library.program_combine(
            r.program, out.ctypes.data, 1, target.ctypes.data, routing, WIDTH, ctypes.byref(expert), 0.5
        )
        r.tokens(num_tokens)
        assert r.run() == 0
    assert not np.isnan(target).any()
    for (token, _), row in rows.items():
        np.testing.assert_array_equal(target[row], values[token])
    total = np.array([sum(factors) for factors in weights])[:, None] * values.astype(np.float64)
    gate = 1 / (1 + np.exp(-logits[:, NUM:].astype(np.float64)))
    expected = residual + 0.5 * (total + gate * shared)
    size = np.abs(residual) + np.abs(total) * CHOSEN + np.abs(shared)
    assert_near(out, expected, 40 * EPS * size)


@pytest.mark.parametrize("limit", [0.4, 7.0])
def test_the_clamped_swiglu_of_gpt_oss(library: ctypes.CDLL, limit: float) -> None:
    """The matmul is with the identity, for one expert of three."""
    inner, alpha = 48, 1.702
    with recording(library) as r:
        depth = 2 * inner
        values = np.round(random(1, 4, depth, scale=4), 1)
        values[0, 0], values[1, inner] = -60, 60
        identity = torch.eye(depth).tile(3, 1).bfloat16()
        from pipeline.kernels.matrix import Matrix
        from pipeline.runtime.model.special_layers import Experts
        from pipeline.stages.execute.cpu.native.experts import stacked_parts
        from pipeline.stages.execute.program import Linear

        halves = [Matrix("bf16", half.contiguous(), inner, depth) for half in identity.split(inner)]
        experts = Experts(num=3, num_per_token=1, intermediate_size=inner)
        ((part, order),) = stacked_parts(Linear(tuple(halves)), experts, range(inner), is_gated=True)
        rows, gathered_rows = r.rows(4, depth), r.rows(4 + 16, depth)
        kept = r.put(rows, values, ActivationForm.PLAIN)
        out = r.floats(np.full((4 + 16, inner), np.nan))
        logits = r.floats(np.array([[0, 1, 0]] * 4, np.float32))
        gathered = (native.NativeGatheredRows * 1)()
        gathered[0].source, gathered[0].target = rows, gathered_rows
        gathered[0].bytes = library.activation_bytes(ActivationForm.PLAIN, depth)
        route_form = native.NativeRouteOptions(0, 1, 1.0, None)
        routing = library.program_route(
            r.program, logits.ctypes.data, 3, ctypes.byref(route_form), 3, 1, 16, gathered, 1
        )
        assert len(part.matrices) == 6
        stacked = Matrix("bf16", identity, 3 * depth, depth)
        products = r.products((r.pack(stacked, order.tolist()), gathered_rows))
        library.program_experts_gate_up(
            *(r.program, native.NativeRows(out.ctypes.data, inner * 4), 1, products, 1),
            *(native.ACTIVATIONS["swiglu_oai"], alpha, limit, 0, routing),
        )
        r.tokens(4)
        assert r.run() == 0
        names = [library.program_name(r.program, i).decode() for i in range(library.program_size(r.program))]
        assert names == ["route", "gather", "experts_gate_up"]
    gate, up = kept.values[:, :inner].clip(max=limit), kept.values[:, inner:].clip(-limit, limit)
    expected = gate / (1 + np.exp(-alpha * gate)) * (up + 1)
    assert_near(out[:4], expected, 1e-5 * (np.abs(expected) + 1))
