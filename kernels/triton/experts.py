"""Mixtures of experts: each token is computed by the experts that its router chooses.

    route     the experts of each token, and their weights, from the router's logits
    sort      the choices of each expert, in the order of tokens
    gate_up   activation(gate) * up of each choice, a tile of an expert's choices and outputs per program
    down      the last matrix of each choice, likewise
    combine   the weighted sum of each token's choices, in their order, and the shared expert

The results of a choice have its place (token * C + number of the choice), so no tokens move, and no program waits for
another. A grid has programs for every expert and for as many tiles as an expert would have if all tokens chose it;
those beyond its choices end at once. The sums of a token do not depend on the other tokens.

Matrices of all experts are one `DeviceMatrix`, an expert's rows below those of the one before.

Shapes: M tokens, E experts, C choices of a token, H hidden size, I intermediate size, P split-K partials.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.experts import ExpertActivation, RouteOptions
from pipeline.kernels.triton.activations import activation, gated_activation
from pipeline.kernels.triton.gemm.codes import code_number
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix
from pipeline.kernels.triton.inputs import sum_partials
from pipeline.kernels.triton.launch import UPCAST_DOT, next_power_of_2

BLOCK_M, BLOCK_N, BLOCK_K = 16, 64, 64
"""The tile of a program: choices, outputs, inputs."""
COMBINED = 1024
"""Numbers of a token that a program combines."""
SORTED = 1024
"""Choices that a program looks at together."""
_LOWEST = tl.constexpr(-3.4e38)
"""Of the ranks of experts; those that are taken, or not there, have -inf."""


@dataclass(frozen=True, slots=True)
class Order:
    """The choices of each expert, for `sort`."""

    choice_indices: Tensor
    """[E, at least M] int32"""
    counts: Tensor
    """[E] int32"""


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """A matrix of every expert."""

    matrix: DeviceMatrix
    """[E * outputs, inputs]"""
    bias: Tensor | None = None
    """[E * outputs] float32"""


def route(
    chosen: Tensor, weights: Tensor, split_k_partials: Tensor, form: RouteOptions, selection_bias: Tensor | None = None
) -> None:
    """chosen [M, C] int32, weights [M, C] float32, split_k_partials [P, M, E or more], the first of which are the
    logits; selection_bias [E] float32 is added to scores to choose experts. The largest comes first, among equal ones
    the first expert."""
    num_partials, num_tokens, width = split_k_partials.shape
    _route[(num_tokens,)](
        *(chosen, weights, split_k_partials, weights if selection_bias is None else selection_bias),
        *(num_tokens, form.scale),
        NUM_EXPERTS=form.num_experts,
        WIDTH=width,
        CHOICES=chosen.shape[1],
        CHOICES_BLOCK=next_power_of_2(chosen.shape[1]),
        NUM_PARTIALS=num_partials,
        SIGMOID=form.scoring == "sigmoid",
        BIASED=selection_bias is not None,
        NORMALIZED=form.normalized,
        NUM_GROUPS=form.num_groups,
        GROUPS_PER_TOKEN=form.groups_per_token,
        BEST_OF_GROUP=form.best_of_group,
        BLOCK=next_power_of_2(form.num_experts),
        num_warps=1,
    )


def sort(order: Order, chosen: Tensor) -> None:
    """Find the places of each expert's choices. chosen [M, C] int32."""
    choice_indices, counts = order.choice_indices, order.counts
    _sort[(len(counts),)](
        *(choice_indices, counts, chosen, chosen.numel()), STRIDE=choice_indices.shape[1], BLOCK=SORTED, num_warps=4
    )


def gate_up(
    out: Tensor,
    x: Tensor,
    order: Order,
    gate: ExpertLinear,
    up: ExpertLinear | None,
    num_choices: int,
    form: ExpertActivation,
) -> None:
    """out [M * C, I], x [M, H], both of the matrices' dtype; gate and up [E * I, H]. Without `up`, the layer is not
    gated."""
    assert form.gated == (up is not None)
    _launch(out, x, order, gate, up, num_choices, len(x), form)


def down(out: Tensor, inner: Tensor, order: Order, last: ExpertLinear, num_tokens: int) -> None:
    """out [M * C, H] float32, inner [M * C, I], last [E * H, I]."""
    _launch(out, inner, order, last, None, 1, num_tokens, None)


def _launch(
    out: Tensor,
    x: Tensor,
    order: Order,
    first: ExpertLinear,
    second: ExpertLinear | None,
    num_choices: int,
    most: int,
    form: ExpertActivation | None,
) -> None:
    """`most` is the largest number of choices that an expert may have."""
    width = out.shape[1]
    other = second or first
    assert (first.bias is None) == (other.bias is None)
    unused = order.counts
    _experts[(len(order.counts), triton.cdiv(width, BLOCK_N), triton.cdiv(most, BLOCK_M))](
        *(out, x, order.choice_indices, order.counts, first.matrix.planes(), other.matrix.planes()),
        *(unused if linear.bias is None else linear.bias for linear in (first, other)),
        STRIDE=order.choice_indices.shape[1],
        CHOICES=num_choices,
        NUM_ROWS=width,
        NUM_COLUMNS=x.shape[1],
        GATED=second is not None,
        BIASED=first.bias is not None,
        KIND="none" if form is None else form.kind,
        ALPHA=0.0 if form is None else form.alpha,
        LIMIT=0.0 if form is None else form.limit,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        UPCAST=UPCAST_DOT,
        num_warps=4,
    )


def combine(out: Tensor, parts: Tensor, weights: Tensor, shared: Tensor | None, gates: Tensor | None) -> None:
    """out [M, H] float32, parts [M * C, H] float32, weights [M, C], shared [P, M, H] or None: the result of the expert
    that computes every token. gates [Q, M, G] or None: the sigmoid of the last of G is its weight."""
    num_tokens, width = out.shape
    _combine[(num_tokens, triton.cdiv(width, COMBINED))](
        *(out, parts, weights, out if shared is None else shared, out if gates is None else gates, num_tokens),
        WIDTH=width,
        CHOICES=weights.shape[1],
        NUM_SHARED=0 if shared is None else len(shared),
        NUM_GATES=0 if gates is None else len(gates),
        GATES_WIDTH=0 if gates is None else gates.shape[2],
        BLOCK=COMBINED,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _route(
    chosen,
    weights,
    split_k_partials,
    selection_bias,
    num_tokens,
    scale,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOICES_BLOCK: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < NUM_EXPERTS
    distance = num_tokens.to(tl.int64) * WIDTH
    logits = sum_partials(split_k_partials + token * WIDTH, columns, inside, distance, NUM_PARTIALS)
    # `ranked` chooses, and `scores` become weights. Logits rank as their softmax does.
    if SIGMOID:
        all_scores = 1.0 / (1.0 + tl.exp(-logits))
        ranked = all_scores
        total = 1.0
    else:
        top = tl.max(tl.where(inside, logits, -float("inf")), axis=0)
        all_scores = tl.where(inside, tl.exp(logits - top), 0.0)
        total = tl.sum(all_scores, axis=0)
        ranked = logits
        if BIASED or (NUM_GROUPS > 1 and BEST_OF_GROUP > 1):
            ranked = all_scores / total
    if BIASED:
        ranked += tl.load(selection_bias + columns, mask=inside, other=0.0)
    # Each choice is another expert, also among NaN and -inf: an expert's list has room for each token once.
    ranked = tl.where(ranked > _LOWEST, ranked, _LOWEST)
    ranked = tl.where(inside, ranked, -float("inf"))
    if NUM_GROUPS > 1:
        ranked = _in_best_groups(
            ranked, columns, NUM_EXPERTS // NUM_GROUPS, NUM_GROUPS, GROUPS_PER_TOKEN, BEST_OF_GROUP
        )
    slots = tl.arange(0, CHOICES_BLOCK)
    picked = tl.zeros([CHOICES_BLOCK], tl.int32)
    scores = tl.zeros([CHOICES_BLOCK], tl.float32)
    for slot in tl.static_range(CHOICES):
        best = tl.argmax(ranked, axis=0)
        score = tl.sum(tl.where(columns == best, all_scores, 0.0), axis=0)
        picked = tl.where(slots == slot, best, picked)
        scores = tl.where(slots == slot, score, scores)
        ranked = tl.where(columns == best, -float("inf"), ranked)
    if NORMALIZED:
        total = tl.sum(scores, axis=0)
    at = token * CHOICES + slots
    tl.store(chosen + at, picked, mask=slots < CHOICES)
    tl.store(weights + at, scores / total * scale, mask=slots < CHOICES)


@triton.jit
def _in_best_groups(
    ranked,
    columns,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
):
    """The scores; the lowest one for experts outside a token's best groups. Among equal ones, the first is better."""
    own = columns // SIZE
    sums = tl.zeros_like(ranked)
    for group in tl.static_range(NUM_GROUPS):
        of_group = tl.where(own == group, ranked, -float("inf"))
        total = tl.max(of_group, axis=0)
        if BEST_OF_GROUP > 1:
            best = tl.argmax(of_group, axis=0)
            total += tl.max(tl.where(columns == best, -float("inf"), of_group), axis=0)
        sums = tl.where(own == group, total, sums)
    better = tl.zeros_like(columns)
    for group in tl.static_range(NUM_GROUPS):
        other = tl.max(tl.where(own == group, sums, -float("inf")), axis=0)
        better += ((other > sums) | ((other == sums) & (group < own))).to(tl.int32)
    return tl.where((better < GROUPS_PER_TOKEN) | (own >= NUM_GROUPS), ranked, _LOWEST)


@triton.jit(do_not_specialize=["num_choices"])
def _sort(choice_indices, counts, chosen, num_choices, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    count = 0
    for begin in range(0, num_choices, BLOCK):
        choices = begin + tl.arange(0, BLOCK)
        found = (tl.load(chosen + choices, mask=choices < num_choices, other=-1) == expert).to(tl.int32)
        at = count + tl.cumsum(found, axis=0) - 1
        tl.store(choice_indices + expert.to(tl.int64) * STRIDE + at, choices, mask=found == 1)
        count += tl.sum(found, axis=0)
    tl.store(counts + expert, count)


@triton.jit
def _tile(weight, rows, inside_rows, columns, inside_columns):
    """A tile of a matrix [K, N], float32, and zeros outside."""
    inside = inside_columns[:, None] & inside_rows[None, :]
    return code_number(weight, rows[None, :], columns[:, None], inside)


@triton.jit
def _experts(
    out,
    x,
    choice_indices,
    counts,
    first,
    second,
    first_bias,
    second_bias,
    STRIDE: tl.constexpr,
    CHOICES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Row `choice // CHOICES` of x times the matrix of an expert is row `choice` of out; then the activation KIND, if
    GATED with the product of a second matrix."""
    expert = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + expert)
    begin = tl.program_id(2) * BLOCK_M
    if begin < count:
        at = begin + tl.arange(0, BLOCK_M)
        inside_m = at < count
        choice = tl.load(choice_indices + expert * STRIDE + at, mask=inside_m, other=0).to(tl.int64)
        rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_n = rows < NUM_ROWS
        weight_rows = expert * NUM_ROWS + rows
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        other = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        source = x + (choice // CHOICES)[:, None] * NUM_COLUMNS
        dtype = tl.float32 if UPCAST else x.dtype.element_ty
        for depth in range(0, NUM_COLUMNS, BLOCK_K):
            columns = depth + tl.arange(0, BLOCK_K)
            inside_k = columns < NUM_COLUMNS
            tile = tl.load(source + columns[None, :], mask=inside_m[:, None] & inside_k[None, :], other=0.0).to(dtype)
            weights = _tile(first, weight_rows, inside_n, columns, inside_k).to(dtype)
            acc = tl.dot(tile, weights, acc, input_precision="ieee")
            if GATED:
                weights = _tile(second, weight_rows, inside_n, columns, inside_k).to(dtype)
                other = tl.dot(tile, weights, other, input_precision="ieee")
        if BIASED:
            acc += tl.load(first_bias + weight_rows, mask=inside_n, other=0.0)[None, :]
            if GATED:
                other += tl.load(second_bias + weight_rows, mask=inside_n, other=0.0)[None, :]
        if GATED:
            acc = gated_activation(acc, other, KIND, ALPHA, LIMIT)
        elif KIND != "none":
            acc = activation(acc, KIND)
        target = out + choice[:, None] * NUM_ROWS + rows[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside_m[:, None] & inside_n[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _combine(
    out,
    parts,
    weights,
    shared,
    gates,
    num_tokens,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    NUM_GATES: tl.constexpr,
    GATES_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    num = num_tokens.to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        index = token * CHOICES + choice
        part = tl.load(parts + index * WIDTH + columns, mask=inside, other=0.0)
        total += part * tl.load(weights + index)
    if NUM_SHARED > 0:
        added = sum_partials(shared + token * WIDTH, columns, inside, num * WIDTH, NUM_SHARED)
        if NUM_GATES > 0:
            last = gates + token * GATES_WIDTH + GATES_WIDTH - 1
            gate = sum_partials(last, 0, True, num * GATES_WIDTH, NUM_GATES)
            added *= 1.0 / (1.0 + tl.exp(-gate))
        total += added
    tl.store(out + token * WIDTH + columns, total, mask=inside)
