"""A program in the CPU library: a step is one native call that runs without Python.

Weights are packed into panels when the program is recorded. Keys and values are stored in the order in which matmuls
read them (kernels/cpu/gemm.h and linear.h). The library has its own threads.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import Activations, Form, KVType
from pipeline.kernels.logprob_inputs import FloatArray, ScoreInputs
from pipeline.kernels.sampling_inputs import SamplingInputs
from pipeline.kernels.step_inputs import IntArray, StepInputs, block_bytes
from pipeline.lora.adapter_file import AdapterFile, Target
from pipeline.runtime.model_folder import ModelConfig, Rope
from pipeline.stages.execute.adapters import DOWN, OUT, QKV, LoraPlan, gate_up
from pipeline.stages.execute.cpu.key_calibration import CalibratedLayer, KeyFactors, calibrate_keys
from pipeline.stages.execute.cpu.native_experts import NativeExperts, inputs_of
from pipeline.stages.execute.cpu.native_lora import NativeLora, PackedAdapter
from pipeline.stages.execute.cpu.native_memory import (
    PAIR,
    NativeMemory,
    have_one_format,
    swiglu_order,
    turning_order,
)
from pipeline.stages.execute.cpu.native_ranks import RankMemory
from pipeline.stages.execute.cpu.panel_file import PanelPlace, PanelStore
from pipeline.stages.execute.cpu.pipeline_link import PipelineLink
from pipeline.stages.execute.cpu.program import (
    AnyMatrix,
    AttentionWeights,
    Embedding,
    ExpertsWeights,
    Head,
    HeadNorms,
    Linear,
    LogitArray,
    MasksLate,
    MlpWeights,
    Norm,
    Program,
    SwapArray,
)
from pipeline.stages.execute.cpu.rank_group import RankGroup
from pipeline.stages.execute.cpu.share import share_of
from pipeline.stages.execute.key_center import allows_center, key_center
from pipeline.stages.execute.kv import KVPlan
from pipeline.stages.execute.layer_split import Part
from pipeline.stages.execute.models.features import NATIVE, missing
from pipeline.stages.execute.rope import rope_table, rotations

MASKS_LATE = 1
RANK_LATE = 2


def unsupported(config: ModelConfig) -> str | None:
    """Why the library can't compute a model of this shape, or None."""
    if config.head_dim > native.MAX_HEAD_DIM:
        return f"head_dim is {config.head_dim}, above {native.MAX_HEAD_DIM}"
    if config.head_dim % native.PANEL:
        return f"head_dim is {config.head_dim}, not a multiple of {native.PANEL}"
    experts = [] if config.experts is None else [config.experts.intermediate_size]
    if any(size % 2 for size in (config.hidden_size, *config.inner_sizes, *experts)):
        return "hidden_size and intermediate_size must be even"
    if config.activation == "swiglu_oai" and config.inner_sizes:
        return "the activation swiglu_oai is only for experts"
    if lacking := missing(config, NATIVE):
        return f"the CPU library lacks {lacking}"
    return None


class NativeProgram(Program):
    """Owns the packed weights, the KV memory and the thread pool."""

    def __init__(
        self,
        library: ctypes.CDLL,
        isa: str,
        num_threads: int,
        config: ModelConfig,
        inputs: StepInputs,
        sampling_inputs: SamplingInputs,
        scores: ScoreInputs,
        kv: KVPlan,
        swap: SwapArray | None = None,
        activations: Activations = "int12",
        kv_type: KVType = KVType.BF16,
        panels: PanelPlace | None = None,
        lora: LoraPlan | None = None,
        ranks: RankGroup | None = None,
        part: Part | None = None,
        link: PipelineLink | None = None,
    ) -> None:
        """`activations` is the precision of activations for 4-bit weights. With `panels`, packed matrices of files are
        kept there. With `ranks`, the program computes a rank's share, and meets the others at barriers. With a `link`,
        it is a stage of a pipeline, which computes a `part` of the layers: `kv` is theirs."""
        assert unsupported(config) is None
        self.isa = isa
        self.name = f"cpu, {isa}"
        self._library = library
        self._config = config
        self._inputs, self._sampling_inputs = inputs, sampling_inputs
        self._places = kv.layout.places
        self._num_blocks = num_blocks = kv.num_blocks
        max_model_len = kv.max_model_len
        self._scores = scores
        self._scoring: int | None = None
        self._thread_pool = native.ThreadPool(library, num_threads)
        self._panels = None if panels is None else PanelStore(library, self._thread_pool, panels)
        self._memory = NativeMemory(library, self._thread_pool, activations, self._panels)
        self._table: tuple[AnyMatrix, native.PackedMatrix] | None = None
        self._head: native.PackedMatrix | None = None
        self._lora = None if lora is None else NativeLora(library, self._memory, lora, config, inputs.max_num_tokens)
        self._num_layers, self._max_model_len = 0, max_model_len
        self._captured: list[native.NativeRows] = []
        self._given = 0, 0
        """Address and width."""
        self._calibrated: list[CalibratedLayer] = []
        self._ticket = native.MaskTicket(None, 0, 0)
        self._handle = library.program_new(self._thread_pool.handle, ctypes.byref(self._step_arrays()))
        self._share = share = share_of(config) if ranks is None else ranks.share
        self._ranks, self._link = ranks, link
        self._part = Part(range(config.num_layers)) if part is None else part
        if link is not None:
            link.use(self._handle)
        gathered = self._gathered = RankMemory(library, self._memory, ranks)
        max_num_tokens = inputs.max_num_tokens
        width = config.num_heads * config.head_dim
        self._residual = gathered.floats(max_num_tokens, config.hidden_size)
        self._queries = self._memory.rows(max_num_tokens, len(share.heads) * config.head_dim)
        self._normed: dict[tuple[Form, int], native.NativeRows] = {}
        """By form and place: parallel layers read the results of two norms."""
        self._attended = gathered.rows(max_num_tokens, width)
        inner = max(config.inner_sizes, default=0)
        self._gated = gathered.rows(max_num_tokens, inner)
        self._wide = gathered.floats(max_num_tokens, -(-max(width, inner) // PAIR) * PAIR)
        self._logits = gathered.floats(inputs.max_num_samples if self._part.is_last else 0, config.vocab_size)
        gathered.use(self._handle, num_threads, inputs.max_num_samples)
        self._branch = gathered.floats(max_num_tokens, config.hidden_size) if config.post_norms else 0
        all_heads = config.num_heads + 2 * config.num_kv_heads
        has_norm_of_all = config.qk_norm and config.qk_norm_kind == "all"
        self._qkv = gathered.floats(max_num_tokens, all_heads * config.head_dim) if has_norm_of_all else None
        self._experts = None
        if config.experts is not None:
            self._experts = NativeExperts(
                library, self._memory, config, max_num_tokens, self._normed_rows, gathered, share
            )
        self._query_form, self._score_form = self._forms(max_model_len)
        self._angles: dict[Rope | None, tuple[int, int]] = {}
        """Addresses of cosines and sines of every position, [max_model_len, head_dim / 2] each."""
        for rope, rotation in rotations(config, max_model_len).items():
            cos, sin = rope_table(rotation.frequencies, max_model_len, rotation.magnitudes)
            self._angles[rope] = self._memory.vector(cos), self._memory.vector(sin)
        self._kv = [
            native.NativeLayerMemory(
                self._memory.allocate(num_blocks * layer_bytes(config, kv_type, len(share.kv_heads))),
                len(share.kv_heads),
                config.head_dim,
                kv_type,
            )
            for _ in range(kv.layout.num_places)
        ]
        """By place in a block."""
        self._swap = swap
        """Keeps the memory alive: the library has only its address."""
        self._blocks = self._block_places(num_blocks, layer_bytes(config, kv_type, len(share.kv_heads)))
        self._plans: dict[tuple[int, int], int] = {}

    def embed(self, embedding: Embedding | None) -> None:
        if embedding is None:
            # Rank 0 may still copy the hidden states of the stage before.
            self._barrier("hidden states")
            return
        config, library, table = self._config, self._library, embedding.table
        self._table = table, self._memory.pack((table,), rows_of(self._share.vocab))
        library.program_embed(self._handle, self._residual, self._table[1], config.embedding_scale)
        if embedding.positions is not None:
            positions = self._memory.pack((embedding.positions,))
            library.program_positions(self._handle, self._residual, positions, config.position_offset)
        self._barrier("embed")
        if embedding.norm is not None:
            norm = self._native_norm(embedding.norm)
            library.program_add_norm(self._handle, self._residual, None, norm, config.hidden_size, 1.0)
            self._barrier("embed")

    def attention(self, weights: AttentionWeights) -> None:
        self._capture_residual()
        self._add_norms(weights.norm, weights.qkv)
        self._attend(weights)

    def attention_of_given(self, weights: AttentionWeights, width: int) -> None:
        max_num_tokens = self._inputs.max_num_tokens
        self._given = self._memory.floats(max_num_tokens, width), width
        rows: dict[Form, native.NativeRows] = {}
        for form in dict.fromkeys(self._memory.form(matrix) for matrix in weights.qkv.matrices):
            rows[form] = self._memory.rows(max_num_tokens, width, form)
            self._library.program_any_norm(
                self._handle, rows[form], form, self._given[0], self._native_norm(None), width, False
            )
        self._attend(weights, inputs_at=rows.__getitem__)

    def _capture_residual(self) -> None:
        """Keep the residual before a captured layer, in the precision of activations."""
        if self._num_layers in self.captured_layers:
            size = self._config.hidden_size
            rows = self._memory.rows(self._inputs.max_num_tokens, size, Form.PLAIN)
            self._captured.append(rows)
            none = self._native_norm(None)
            self._library.program_any_norm(self._handle, rows, Form.PLAIN, self._residual, none, size, False)

    def mlp(self, weights: MlpWeights) -> None:
        self._add_norms(weights.norm, weights.gate_up)
        self._feed_forward(weights)

    def experts(self, weights: ExpertsWeights) -> None:
        assert self._experts is not None
        self._add_norms(weights.norm, inputs_of(weights))
        layer = self._layer
        if weights.post_norm is None:
            self._experts.record(self._handle, weights, self._residual, layer, adds=True)
            return
        self._experts.record(self._handle, weights, self._branch, layer, adds=False)
        self._add_branch(weights.post_norm, "experts")

    def parallel(self, attention: AttentionWeights, mlp: MlpWeights) -> None:
        self._capture_residual()
        # Both norms come before attention changes the residual.
        place = 0 if mlp.norm is None else 1
        written = self._add_norms(attention.norm, attention.qkv)
        self._add_norms(mlp.norm or attention.norm, mlp.gate_up, place, set() if place else written)
        self._attend(attention)
        self._feed_forward(mlp, place)

    def borrow_head(self, other: Program) -> None:
        assert isinstance(other, NativeProgram)
        self._head = other._head

    def sample(self, head: Head) -> None:
        config, norm = self._config, head.norm
        self._library.program_layer(self._handle, -1)
        if norm is not None:
            bias = None if norm.bias is None else np.asarray(norm.bias, np.float32)
            self.last_norm = Norm(np.asarray(norm.weight, np.float32), bias)
        packed = self._head
        if packed is None:
            # A tied head shares the embedding's memory.
            tied = self._table is not None and self._table[0] is head.matrix and head.bias is None
            packed = (
                self._table[1]
                if self._table is not None and tied
                else self._memory.pack((head.matrix,), rows_of(self._share.vocab), head.bias)
            )
        self._head = packed
        places = packed, config.vocab_size, self._logits, self._inputs.max_num_samples
        form = self._memory.form(head.matrix)
        form_of_logits = config.logit_scale, config.logit_softcap or 0.0
        self._add_norm(self._handle, form, norm, sampled=True)
        self._library.program_logit_form(self._handle, *form_of_logits)
        self._library.program_sample(
            self._handle,
            self._normed_rows(form),
            *places,
            ctypes.byref(self._ticket),
            ctypes.byref(native.NativeSamplingArrays.of(self._sampling_inputs)),
        )
        # A second program with the same residual and head, for the logprobs of tokens that are not sampled.
        arrays = self._step_arrays()
        arrays.sampled = self._scores.places.ctypes.data
        self._scoring = self._library.program_new(self._thread_pool.handle, ctypes.byref(arrays))
        self._gathered.use(self._scoring)
        # Rank 0 may still read the logits of the scores before.
        self._gathered.barrier(self._scoring, "scores", -1)
        self._add_norm(self._scoring, form, norm, sampled=True)
        self._library.program_logit_form(self._scoring, *form_of_logits)
        scores = native.NativeScoreArrays.of(self._scores)
        self._library.program_score(self._scoring, self._normed_rows(form), *places, ctypes.byref(scores))

    def finish_loading(self) -> None:
        if self._calibrated:
            sizes = self._config.vocab_size, self._max_model_len, self._num_blocks
            run = self.run if self._link is None else partial(self._run_while_loading, self._link)
            calibrate_keys(self._calibrated, self._inputs, run, *sizes)
        if self._panels is not None:
            self._panels.save(self._memory.kept)
        for group in (self._ranks, self._link):
            if group is not None:
                group.finish_loading()

    def _run_while_loading(self, link: PipelineLink) -> None:
        """Run the program over the hidden states of the stage before, and give the next one its own."""
        link.begin(0, 0)
        is_first_rank = self._share.rank == 0
        if not self._part.is_first:
            link.receive(self.residual(), copies=is_first_rank)
        self.run()
        if not self._part.is_last and is_first_rank:
            link.send(self.residual(), 0.0)
        link.end()

    def run(self) -> IntArray:
        inputs = self._inputs
        status = self._library.program_run(self._handle, inputs.num_tokens, inputs.num_rows, inputs.num_samples)
        if status == MASKS_LATE:
            raise MasksLate(f"masks did not arrive within {self._ticket.timeout_ms} ms")
        self._check_ranks(status)
        return self._sampling_inputs.ids[: inputs.num_samples].copy()

    def score(self) -> None:
        self._check_ranks(self._library.program_run(self._scoring, self._inputs.num_tokens, 0, self._scores.num))

    def _check_ranks(self, status: int) -> None:
        if status == RANK_LATE:
            assert self._ranks is not None
            raise self._ranks.late_error()

    def residual(self) -> FloatArray:
        size = self._inputs.num_tokens, self._config.hidden_size
        array: FloatArray = np.ctypeslib.as_array(ctypes.cast(self._residual, ctypes.POINTER(ctypes.c_float)), size)
        return array

    def captured(self) -> FloatArray:
        num, size = self._inputs.num_tokens, self._config.hidden_size
        dtype: type[np.generic] = np.uint16 if self._library.act_bytes() == 2 else np.float32
        parts = []
        for rows in self._captured:
            memory = (ctypes.c_uint8 * (num * rows.stride)).from_address(rows.data)
            acts = np.frombuffer(memory, np.uint8).reshape(num, rows.stride).view(dtype)[:, :size]
            parts.append((acts.astype(np.uint32) << 16).view(np.float32) if acts.dtype == np.uint16 else acts)
        array: FloatArray = np.concatenate(parts, axis=1)
        return array

    def given(self) -> FloatArray:
        address, width = self._given
        size = self._inputs.num_tokens, width
        array: FloatArray = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), size)
        return array

    def copy_blocks(self, sources: IntArray, targets: IntArray) -> None:
        assert sources.dtype == targets.dtype == np.int32 and sources.shape == targets.shape
        sources, targets = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
        self._library.copy_blocks(
            self._thread_pool.handle, ctypes.byref(self._blocks), sources.ctypes.data, targets.ctypes.data, len(sources)
        )

    def wait_for(self, word: int, expected: int, timeout_ms: int) -> None:
        self._ticket.expected, self._ticket.timeout_ms = expected, timeout_ms
        self._ticket.word = word or None

    def logits(self) -> LogitArray:
        num, width = self._inputs.num_samples, self._config.vocab_size
        array: LogitArray = np.ctypeslib.as_array(
            ctypes.cast(self._logits, ctypes.POINTER(ctypes.c_float)), (num, width)
        )
        return array

    def keep_logits(self) -> None:
        self._sampling_inputs.keeps_logits = True
        self._sampling_inputs.greedy[:] = 0

    def profile(self) -> list[tuple[str, float]]:
        """Compute the step in the inputs. Returns each op's name and seconds."""
        inputs, library = self._inputs, self._library
        seconds = np.zeros(library.program_size(self._handle), np.float64)
        library.program_profile(
            self._handle, inputs.num_tokens, inputs.num_rows, inputs.num_samples, seconds.ctypes.data
        )
        names = [library.program_name(self._handle, i).decode() for i in range(len(seconds))]
        return list(zip(names, seconds.tolist(), strict=True))

    def costs(self) -> list[tuple[float, float, bool]]:
        """For each op of the step in the inputs: bytes that it must move, operations, whether they are on integers."""
        inputs, library = self._inputs, self._library
        out = (ctypes.c_double * 3)()
        costs = []
        for i in range(library.program_size(self._handle)):
            library.program_cost(self._handle, i, inputs.num_tokens, inputs.num_rows, inputs.num_samples, out)
            costs.append((out[0], out[1], bool(out[2])))
        return costs

    def pack_adapter(self, file: AdapterFile) -> PackedAdapter:
        assert self._lora is not None, "adapters are off"
        return self._lora.pack(file)

    def put_adapter(self, slot: int, packed: PackedAdapter) -> None:
        assert self._lora is not None, "adapters are off"
        self._lora.put(slot, packed)

    def close(self) -> None:
        if self._handle:
            self._library.program_delete(self._handle)
            if self._scoring:
                self._library.program_delete(self._scoring)
            self._handle = self._scoring = None
            if self._ranks is not None:
                self._ranks.close()
            if self._panels is not None:
                self._panels.close()
            self._thread_pool.close()
            self._memory.free()
            self._swap = None

    # The methods below lay out memory. Addresses are plain numbers; `_kept` keeps the memory alive.

    # The methods below record parts of layers. Addresses are plain numbers; `_memory` keeps the memory alive.

    def _attend(
        self,
        weights: AttentionWeights,
        place: int = 0,
        inputs_at: "Callable[[Form], native.NativeRows] | None" = None,
    ) -> None:
        """Record attention after its norm, whose results are at `place`, or of other inputs."""
        config, library = self._config, self._library
        group, kv_place = self._places[self._num_layers]
        self._library.program_layer(self._handle, self._part.layers.start + self._num_layers)
        kv = ctypes.byref(self._layer_kv(weights, group, kv_place))
        self._num_layers += 1
        inputs = self._inputs
        library.program_use_tables(
            self._handle, inputs.group_slots[group].ctypes.data, inputs.group_tables[group].ctypes.data
        )
        share, num_heads, num_kv_heads = self._share, config.num_heads, config.num_kv_heads
        keys = [num_heads + head for head in share.kv_heads]
        kinds = [list(share.heads), keys, [head + num_kv_heads for head in keys]]
        inputs_at = inputs_at or partial(self._normed_rows, place=place)
        norms = self._head_norms(weights.head_norms)
        angles = self._angles[weights.rope]
        if self._qkv is not None and not share.is_whole:
            for heads in kinds:
                self._gather_qkv(weights.qkv, heads, inputs_at)
            self._barrier("qkv")
            places = native.NativeHeadShare(num_heads, num_kv_heads, share.heads.start, share.kv_heads.start)
            library.program_qkv_rows(
                *(self._handle, self._queries, len(share.heads), kv, *angles, norms, self._query_form, self._qkv),
                ctypes.byref(places),
            )
        else:
            order = turning_order(num_heads + num_kv_heads, [head for kind in kinds for head in kind], config.head_dim)
            products = self._memory.products(weights.qkv, order, inputs_at)
            self._adapt(QKV, weights.qkv, config.hidden_size, place)
            library.program_qkv(
                *(self._handle, self._queries, products, len(products), len(share.heads), kv, *angles),
                *(norms, self._query_form, self._qkv),
            )
        width = num_heads * config.head_dim
        matrix = weights.out.matrices[0]
        rows, floats = self._written(self._attended, width, matrix, share.heads.start * config.head_dim)
        plan = self._plan(weights.window or 0, group)
        form = self._score_form
        if weights.sinks is not None:
            sinks = np.asarray(weights.sinks, np.float32)[share.heads.start : share.heads.stop]
            form = native.NativeScoreForm(form.softcap, form.slopes, self._memory.vector(sinks))
        library.program_attention(self._handle, rows, floats, self._queries, kv, plan, ctypes.byref(form))
        self._barrier("attention")
        self._add(self._attended, width, weights.out, weights.post_norm, OUT, "o")

    def _gather_qkv(self, qkv: Linear, heads: list[int], inputs_at: Callable[[Form], native.NativeRows]) -> None:
        """Record the matmul of these heads, which are adjacent and of one kind; the results of all ranks lie side by
        side."""
        config, library = self._config, self._library
        num_turning = config.num_heads + config.num_kv_heads
        products = self._memory.products(qkv, turning_order(num_turning, heads, config.head_dim), inputs_at)
        found = [product for product in products if product.matrix.columns]
        assert len(found) == 1 and self._qkv is not None
        library.program_stride(self._handle, (num_turning + config.num_kv_heads) * config.head_dim)
        out = self._qkv + 4 * heads[0] * config.head_dim
        (product,) = found
        library.program_linear(self._handle, out, product.rows, product.matrix, len(heads) * config.head_dim)

    def _layer_kv(self, weights: AttentionWeights, group: int, place: int) -> native.NativeLayerMemory:
        """The keys and values of a layer in this KV group, at this place in a block."""
        config, kv = self._config, self._kv[place]
        of_biases = key_center(config, weights, self._max_model_len)
        is_calibrated = kv.type == KVType.INT8 and allows_center(config)
        if of_biases is None and not is_calibrated:
            return kv
        heads = self._share.kv_heads
        center = np.zeros((len(heads), config.head_dim), np.float32)
        if of_biases is not None:
            center[:] = of_biases[heads.start : heads.stop, turning_order(1, [0], config.head_dim)]
        kv = native.NativeLayerMemory.from_buffer_copy(kv)  # layers of other groups share the memory
        kv.center = center.ctypes.data
        self._memory.keep(center)
        if is_calibrated:
            # Norms of all heads together leave the tokens of a layer to several threads, which can't add up queries.
            factors = KeyFactors(len(self._share.heads), *center.shape) if self._qkv is None else None
            if factors is not None:
                kv.factors = ctypes.addressof(factors.native)
            self._calibrated.append(CalibratedLayer(kv, group, center, factors))
        return kv

    def _feed_forward(self, weights: MlpWeights, place: int = 0) -> None:
        """Record the feed-forward layer after its norm, whose results are at `place`."""
        config = self._config
        inner, activation = config.intermediate_size, native.ACTIVATIONS[config.activation]
        part = self._share.inner
        rows, floats = self._written(self._gated, inner, weights.down.matrices[0], part.start)
        if config.gated:
            one_format = have_one_format(weights.gate_up.matrices)
            order = swiglu_order(inner, part) if one_format else np.concatenate([rows_of(part), inner + rows_of(part)])
            products = self._memory.products(weights.gate_up, order, partial(self._normed_rows, place=place))
            self._adapt(gate_up(config), weights.gate_up, config.hidden_size, place, interleaved=one_format)
            self._library.program_swiglu(self._handle, rows, floats, products, len(products), activation)
        else:
            products = self._memory.products(weights.gate_up, rows_of(part), partial(self._normed_rows, place=place))
            self._adapt(gate_up(config), weights.gate_up, config.hidden_size, place)
            self._library.program_activate(self._handle, rows, floats, products, len(products), activation, len(part))
        self._barrier("gate_up")
        self._add(self._gated, inner, weights.down, weights.post_norm, DOWN, "down")

    def _forms(self, max_model_len: int) -> tuple[Any, native.NativeScoreForm]:
        """What differs from plain attention in the scale of queries, or null, and in scores."""
        config, query = self._config, None
        if config.query_scale is not None or config.query_growth:
            scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
            growth = None
            if config.query_growth:
                periods = np.arange(max_model_len) // config.query_growth_period
                growth = self._memory.vector((1 + config.query_growth * np.log1p(periods)).astype(np.float32))
            query = native.NativeQueryForm(scale, growth)
        heads = self._share.heads
        slopes = None
        if config.alibi_slopes is not None:
            slopes = self._memory.vector(np.array(config.alibi_slopes[heads.start : heads.stop], np.float32))
        score = native.NativeScoreForm(config.attention_softcap or 0.0, slopes, None)
        return query and ctypes.byref(query), score

    def _add_norms(
        self, norm: Norm | None, linear: Linear, place: int = 0, written: "set[Form] | None" = None
    ) -> set[Form]:
        """Record the norm before a matmul, in every form that its matrices need and that is not in `written`. Returns
        these forms."""
        forms = dict.fromkeys(self._memory.form(matrix) for matrix in linear.matrices)
        for form in forms:
            if written is None or form not in written:
                self._add_norm(self._handle, form, norm, place=place)
        return set(forms)

    def _normed_rows(self, form: Form, place: int = 0) -> native.NativeRows:
        """The output of norms in a form. Norms write several if the matrices after them need several."""
        if (form, place) not in self._normed:
            self._normed[form, place] = self._memory.rows(self._inputs.max_num_tokens, self._config.hidden_size, form)
        return self._normed[form, place]

    def _add_norm(self, handle: int, form: Form, norm: Norm | None, *, place: int = 0, sampled: bool = False) -> None:
        size, eps = self._config.hidden_size, self._config.rms_norm_eps
        rows = self._normed_rows(form, place)
        if norm is not None and self._config.norm == "rms":
            weight = self._memory.vector(norm.weight)
            self._library.program_norm(handle, rows, form, self._residual, weight, size, eps, sampled)
        else:
            self._library.program_any_norm(handle, rows, form, self._residual, self._native_norm(norm), size, sampled)

    def _native_norm(self, norm: Norm | None) -> Any:
        """A norm of any kind; None stands for one that does nothing."""
        if norm is None:
            return ctypes.byref(native.NativeNorm(native.NORM_KINDS["none"], None, None, 0.0))
        bias = None if norm.bias is None else self._memory.vector(norm.bias)
        kind = native.NORM_KINDS[self._config.norm]
        return ctypes.byref(native.NativeNorm(kind, self._memory.vector(norm.weight), bias, self._config.rms_norm_eps))

    def _head_norms(self, norms: HeadNorms | None) -> Any:
        """The weights in the panels' order of a head's dimensions, or null."""
        if norms is None:
            return None
        config = self._config
        order = turning_order(1, [0], config.head_dim)
        parts = (norms.query, self._share.heads), (norms.key, self._share.kv_heads)
        of_heads = [np.asarray(weight).reshape(-1, config.head_dim)[:, order] for weight, _ in parts]
        query, key = (
            self._memory.vector(weight if config.qk_norm_kind == "head" else weight[heads.start : heads.stop])
            for weight, (_, heads) in zip(of_heads, parts, strict=True)
        )
        each, every = config.qk_norm_kind == "each_head", config.qk_norm_kind == "all"
        return ctypes.byref(
            native.NativeHeadNorms(query, key, config.rms_norm_eps, config.norm == "layer", each, every)
        )

    def _plan(self, window: int, group: int) -> int:
        """The attention plan of all layers with this window (0 for none) in a KV group. It becomes an op before the
        first of them."""
        key = window, group
        if key not in self._plans:
            share = self._share
            self._plans[key] = self._library.program_attention_plan(
                self._handle, len(share.heads), len(share.kv_heads), window
            )
        return self._plans[key]

    def _written(
        self, rows: native.NativeRows, width: int, matrix: AnyMatrix, first: int
    ) -> tuple[native.NativeRows, bool]:
        """The output rows of an op before a matmul from column `first` on, and whether they are floats that are
        quantized afterwards."""
        if self._memory.form(matrix) is Form.PLAIN:
            return native.NativeRows(rows.data + first * self._library.act_bytes(), rows.stride), False
        return native.NativeRows(self._wide + first * 4, width * 4), True

    @property
    def _layer(self) -> int:
        """The layer that was recorded last, or -1."""
        return self._part.layers.start + self._num_layers - 1 if self._num_layers else -1

    def _barrier(self, what: str) -> None:
        """Record that all ranks have computed what was recorded before; `what` names the last of it."""
        self._gathered.barrier(self._handle, what, self._layer)

    def _add_branch(self, post_norm: Norm, what: str) -> None:
        """residual += post_norm(branch) * residual_multiplier"""
        norm, factor, hidden = self._native_norm(post_norm), self._config.residual_multiplier, self._config.hidden_size
        self._library.program_add_norm(self._handle, self._residual, self._branch, norm, hidden, factor)
        self._barrier(what)

    def _adapt(
        self, targets: tuple[Target, ...], linear: Linear, depth: int, place: int, *, interleaved: bool = False
    ) -> None:
        """Let adapters change the matmul that is recorded next, which reads the results of the norm at `place`."""
        if self._lora is not None:
            form = self._memory.form(linear.matrices[0])
            rows, layer = self._normed_rows(form, place), self._num_layers - 1
            self._lora.record(self._handle, layer, targets, rows, form, depth, interleaved=interleaved)

    def _add(
        self,
        rows: native.NativeRows,
        width: int,
        linear: Linear,
        post_norm: Norm | None,
        targets: tuple[Target, ...],
        what: str,
    ) -> None:
        """residual += post_norm(rows x matrix) * residual_multiplier"""
        (matrix,) = linear.matrices
        library, hidden, factor = self._library, self._config.hidden_size, self._config.residual_multiplier
        form = self._memory.form(matrix)
        if form is not Form.PLAIN:
            library.program_quantize(self._handle, rows, form, self._wide, width)
        if self._lora is not None:
            self._lora.record(self._handle, self._num_layers - 1, targets, rows, form, width)
        part = self._share.hidden
        packed = self._memory.pack(linear.matrices, rows_of(part), linear.bias)
        library.program_stride(self._handle, hidden)
        if post_norm is None:
            residual = self._residual + 4 * part.start
            library.program_linear_add(self._handle, residual, rows, packed, len(part), factor)
            self._barrier(what)
            return
        library.program_linear(self._handle, self._branch + 4 * part.start, rows, packed, len(part))
        self._barrier(what)
        self._add_branch(post_norm, f"{what} norm")

    def _step_arrays(self) -> native.NativeStepArrays:
        inputs = self._inputs
        names = ("ids", "positions", "slots", "sampled", "starts", "counts", "offsets", "block_tables")
        return native.NativeStepArrays(
            **{name: getattr(inputs, name).ctypes.data for name in names},
            max_blocks=inputs.block_tables.shape[1],
            adapters=inputs.adapters.ctypes.data,
            num_adapted=inputs.num_adapted.ctypes.data,
        )

    def _block_places(self, num_blocks: int, num_bytes: int) -> native.NativeBlocks:
        """The addresses of the blocks of all layers and of swap space."""
        layers = np.array([layer.data for layer in self._kv], np.uint64)
        self._memory.keep(layers)
        return native.NativeBlocks(
            layers=layers.ctypes.data,
            swap=None if self._swap is None else self._swap.ctypes.data,
            num_layers=len(layers),
            num_blocks=num_blocks,
            layer_bytes=num_bytes,
        )


def rows_of(part: range) -> IntArray:
    """The rows of a share."""
    return np.arange(part.start, part.stop, dtype=np.int32)


def layer_bytes(config: ModelConfig, kv_type: KVType, num_kv_heads: int) -> int:
    """Bytes of a KV block in one layer, with this number of heads."""
    return block_bytes(1, num_kv_heads, config.head_dim, 2 if kv_type is KVType.BF16 else 1)
