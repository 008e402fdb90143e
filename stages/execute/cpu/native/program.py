"""A program in the CPU library: a step is one native call that runs without Python.

Weights are packed into panels when the program is recorded. Keys and values are stored in the order in which matmuls
read them (kernels/cpu/gemm.h and linear.h). The library has its own threads.
"""

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np

from pipeline.kernels.cpu import native, native_library
from pipeline.kernels.cpu.native import ActivationForm, KVType
from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.step_inputs import IntArray
from pipeline.lora.adapter_file import AdapterFile
from pipeline.stages.execute.adapters.slots import DOWN, gate_up
from pipeline.stages.execute.cpu.native.attention import NativeAttention
from pipeline.stages.execute.cpu.native.experts import NativeExperts, inputs_of
from pipeline.stages.execute.cpu.native.layers import NativeLayers
from pipeline.stages.execute.cpu.native.lora import NativeLora, PackedAdapter
from pipeline.stages.execute.cpu.native.memory import (
    NativeMemory,
    floats_at,
    have_one_format,
    rows_of,
    step_arrays,
    swiglu_order,
)
from pipeline.stages.execute.cpu.native.norms import NativeNorms
from pipeline.stages.execute.cpu.native.panel_file import PanelStore
from pipeline.stages.execute.cpu.native.ranks import RankMemory
from pipeline.stages.execute.cpu.native.recurrent.delta import NativeDelta
from pipeline.stages.execute.cpu.native.recurrent.parts import RecurrentParts
from pipeline.stages.execute.cpu.native.recurrent.short_conv import NativeShortConv
from pipeline.stages.execute.cpu.native.recurrent.slots import NativeSlots
from pipeline.stages.execute.cpu.native.supported import unsupported
from pipeline.stages.execute.cpu.native.token_inputs import NativeTokenInputs
from pipeline.stages.execute.cpu.program import MasksLate, Program, ProgramPlan
from pipeline.stages.execute.cpu.ranks.pp_link import PPLink
from pipeline.stages.execute.kv import SwapArray
from pipeline.stages.execute.program import (
    AnyMatrix,
    AttentionWeights,
    Embedding,
    ExpertsWeights,
    Head,
    Linear,
    LogitArray,
    MlpWeights,
    Norm,
    PerLayerWeights,
    RecurrentWeights,
    TokenInputs,
)
from pipeline.stages.execute.ranks.layer_split import Part
from pipeline.stages.execute.ranks.share import share_of

MASKS_LATE = 1
RANK_LATE = 2


class NativeProgram(Program):
    """Owns the packed weights, the thread pool, and the parts that record layers and own their memory."""

    def __init__(self, library: ctypes.CDLL, isa: str, plan: ProgramPlan) -> None:
        config, inputs, num_threads, ranks = plan.config, plan.inputs, plan.num_threads, plan.ranks
        execute = plan.settings.execute
        assert execute.activations != "auto", "the runner has chosen"
        assert unsupported(config) is None
        self.isa = isa
        self.name = f"cpu, {isa}"
        self._library = library
        self._config = config
        self._inputs, self._sampling_inputs, self._scores = inputs, plan.sampling_inputs, plan.scores
        self._encoded, self.num_encoded_layers = plan.encoded, plan.encoded.num_layers
        self._scoring: int | None = None
        self._thread_pool = native_library.ThreadPool(library, num_threads)
        self._panels = None if plan.panels is None else PanelStore(library, self._thread_pool, plan.panels)
        # Addresses are plain numbers; `_memory` keeps the memory alive.
        self._memory = memory = NativeMemory(library, self._thread_pool, execute.activations, self._panels)
        self._table: tuple[AnyMatrix, native.PackedMatrix] | None = None
        self._head: native.PackedMatrix | None = None
        max_num_tokens = inputs.max_num_tokens
        self._lora = None if plan.lora is None else NativeLora(library, memory, plan.lora, config, max_num_tokens)
        self._captured: list[native.NativeRows] = []
        self._given = 0, 0
        """Address and width."""
        self._ticket = native.MaskTicket(None, 0, 0)
        self._handle = library.program_new(self._thread_pool.handle, ctypes.byref(step_arrays(inputs)))
        self._share = share = share_of(config) if ranks is None else ranks.share
        self._ranks, self._link = ranks, plan.link
        self._part = Part(range(config.num_layers)) if plan.part is None else plan.part
        if plan.link is not None:
            plan.link.use(self._handle)
        gathered = self._gathered = RankMemory(library, memory, ranks)
        self._residual = gathered.floats(max_num_tokens, config.hidden_size)
        self._gated = gathered.rows(max_num_tokens, max(config.inner_sizes, default=0))
        self._logits = gathered.floats(
            inputs.max_num_samples if self._part.is_last and config.generates else 0, config.vocab_size
        )
        gathered.use(self._handle, num_threads, inputs.max_num_samples)
        self._norms = norms = NativeNorms(library, memory, config, max_num_tokens, self._residual)
        self._layers = NativeLayers(
            *(library, self._handle, memory, config, max_num_tokens, self._residual),
            *(norms, gathered, share, self._lora, self._part.layers.start),
        )
        kv_type = KVType.INT8 if execute.kv_dtype == "int8" else KVType.BF16
        self._attention = NativeAttention(
            *(library, self._handle, memory, config, inputs, plan.kv, kv_type, norms, self._layers, gathered, share)
        )
        self._experts = None
        if config.experts is not None:
            self._experts = NativeExperts(library, memory, config, max_num_tokens, norms, gathered, share)
        self._recurrent = None
        if config.has_states:
            self._slots = slots = NativeSlots(memory, config, plan.kv)
            make: type[NativeDelta | NativeShortConv] = NativeDelta if config.short_conv is None else NativeShortConv
            parts = library, self._handle, memory, config, inputs, slots, norms, self._layers, gathered, share
            self._recurrent = make(RecurrentParts(*parts))
        self._touches_kv = plan.kv.touches
        self._swap = plan.swap
        """Keeps the memory alive: the library has only its address."""
        self._blocks = self._attention.blocks(plan.swap)

    def embed(self, embedding: Embedding | None) -> None:
        if embedding is None:
            # Rank 0 may still copy the hidden states of the stage before.
            self._layers.barrier("hidden states")
            return
        config, library, table = self._config, self._library, embedding.table
        self._table = table, self._memory.pack((table,), rows_of(self._share.vocab))
        encoded = (None, 0) if (cache := self._encoded.rows) is None else (cache.ctypes.data, cache.shape[1])
        library.program_embed(self._handle, self._residual, self._table[1], config.embedding_scale, *encoded)
        if embedding.positions is not None:
            positions = self._memory.pack((embedding.positions,))
            rows = self._inputs.position_rows.ctypes.data
            library.program_positions(self._handle, self._residual, positions, config.position_offset, rows)
        self._layers.barrier("embed")
        self._layers.norm_residual(embedding.norm, "embed norm")

    def token_inputs(self, weights: TokenInputs) -> None:
        where = self._library, self._handle, self._memory, self._config, self._inputs.max_num_tokens
        self._token_inputs = NativeTokenInputs(*where, self._norms, self._layers)
        self._token_inputs.emit(weights)

    def per_layer(self, weights: PerLayerWeights) -> None:
        self._token_inputs.emit_layer(weights)

    def attention(self, weights: AttentionWeights) -> None:
        self._capture_residual()
        read = weights.qkv if weights.gate is None else Linear((*weights.qkv.matrices, *weights.gate.matrices))
        self._norms.emit_before(self._handle, weights.norm, read)
        self._attention.emit(weights)
        self._layers.norm_residual(weights.residual_norm, "o norm")

    def add_encoded(self, layer: int) -> None:
        self._layers.add_encoded(self._encoded, layer)

    def recurrent(self, weights: RecurrentWeights) -> None:
        assert self._recurrent is not None
        self._capture_residual()
        self._norms.emit_before(self._handle, weights.norm, weights.inputs)
        self._recurrent.emit(weights)

    def attention_of_given(self, weights: AttentionWeights, width: int) -> None:
        max_num_tokens = self._inputs.max_num_tokens
        self._given = self._memory.floats(max_num_tokens, width), width
        rows: dict[ActivationForm, native.NativeRows] = {}
        for form in dict.fromkeys(self._memory.form(matrix) for matrix in weights.qkv.matrices):
            rows[form] = self._memory.rows(max_num_tokens, width, form)
            self._library.program_any_norm(
                self._handle, rows[form], form, self._given[0], self._norms.native_norm(None), width, False
            )
        self._attention.emit(weights, inputs_at=rows.__getitem__)

    def _capture_residual(self) -> None:
        """Keep the residual before a captured layer, in the precision of activations."""
        if self._layers.num in self.captured_layers:
            size = self._config.hidden_size
            rows = self._memory.rows(self._inputs.max_num_tokens, size, ActivationForm.PLAIN)
            self._captured.append(rows)
            none = self._norms.native_norm(None)
            self._library.program_any_norm(self._handle, rows, ActivationForm.PLAIN, self._residual, none, size, False)

    def mlp(self, weights: MlpWeights) -> None:
        self._norms.emit_before(self._handle, weights.norm, weights.gate_up)
        self._feed_forward(weights)
        self._layers.norm_residual(weights.residual_norm, "down norm")

    def experts(self, weights: ExpertsWeights) -> None:
        assert self._experts is not None
        if weights.dense is not None:
            self._norms.emit_before(self._handle, weights.dense.norm, weights.dense.gate_up)
            self._feed_forward(weights.dense, stays=True)
        self._norms.emit_before(self._handle, weights.norm, inputs_of(weights))
        self._experts.emit_layer(self._handle, weights, self._residual, self._layers)

    def parallel(self, attention: AttentionWeights, mlp: MlpWeights) -> None:
        self._capture_residual()
        # Both norms come before attention changes the residual.
        slot = 0 if mlp.norm is None else 1
        written = self._norms.emit_before(self._handle, attention.norm, attention.qkv)
        self._norms.emit_before(self._handle, mlp.norm or attention.norm, mlp.gate_up, slot, set() if slot else written)
        self._attention.emit(attention)
        self._feed_forward(mlp, slot)

    def borrow_head(self, other: Program) -> None:
        assert isinstance(other, NativeProgram)
        self._head = other._head

    def pool(self, norm: Norm | None) -> None:
        self._library.program_layer(self._handle, -1)
        self.last_norm = None if norm is None else norm.as_arrays()

    def sample(self, head: Head) -> None:
        config, norm = self._config, head.norm
        self.pool(norm)
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
        target = packed, config.vocab_size, self._logits, self._inputs.max_num_samples
        form = self._memory.form(head.matrix)
        form_of_logits = config.logit_scale, config.logit_softcap or 0.0
        self._norms.emit(self._handle, form, norm, sampled=True)
        self._library.program_logit_form(self._handle, *form_of_logits)
        self._library.program_sample(
            self._handle,
            self._norms.rows(form),
            *target,
            ctypes.byref(self._ticket),
            ctypes.byref(native.NativeSamplingArrays.of(self._sampling_inputs)),
        )
        # A second program with the same residual and head, for the logprobs of tokens that are not sampled.
        arrays = step_arrays(self._inputs)
        arrays.sampled = self._scores.token_indices.ctypes.data
        self._scoring = self._library.program_new(self._thread_pool.handle, ctypes.byref(arrays))
        self._gathered.use(self._scoring)
        # Rank 0 may still read the logits of the scores before.
        self._gathered.barrier(self._scoring, "scores", -1)
        self._norms.emit(self._scoring, form, norm, sampled=True)
        self._library.program_logit_form(self._scoring, *form_of_logits)
        scores = native.NativeScoreArrays.of(self._scores)
        self._library.program_score(self._scoring, self._norms.rows(form), *target, ctypes.byref(scores))

    def finish_loading(self) -> None:
        self._attention.calibrate(self.run if self._link is None else partial(self._run_while_loading, self._link))
        if self._panels is not None:
            self._panels.save(self._memory.kept)
        if self._touches_kv:
            self._attention.pages.start(self._memory.kept)
        for group in (self._ranks, self._link):
            if group is not None:
                group.finish_loading()

    def _run_while_loading(self, link: PPLink) -> None:
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
        return self._sampled_by(self._library.program_run)

    def sample_again(self) -> IntArray:
        return self._sampled_by(self._library.program_sample_again)

    def _sampled_by(self, run: Callable[[int, int, int, int], int]) -> IntArray:
        inputs = self._inputs
        status = run(self._handle, inputs.num_tokens, inputs.num_rows, inputs.num_samples)
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
        return floats_at(self._residual, self._inputs.num_tokens, self._config.hidden_size)

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
        return floats_at(address, self._inputs.num_tokens, width)

    def copy_blocks(self, sources: IntArray, targets: IntArray, other: SwapArray | None = None) -> None:
        self._copy(self._blocks if other is None else self._attention.blocks(other), sources, targets)

    def copy_states(self, swapped: SwapArray, sources: IntArray, targets: IntArray) -> None:
        self._copy(self._slots.blocks(swapped), sources, targets)

    def _copy(self, blocks: native.NativeBlocks, sources: IntArray, targets: IntArray) -> None:
        assert sources.dtype == targets.dtype == np.int32 and sources.shape == targets.shape
        sources, targets = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
        arrays = sources.ctypes.data, targets.ctypes.data
        self._library.copy_blocks(self._thread_pool.handle, ctypes.byref(blocks), *arrays, len(sources))

    def wait_for(self, word: int, expected: int, timeout_ms: int) -> None:
        self._ticket.expected, self._ticket.timeout_ms = expected, timeout_ms
        self._ticket.word = word or None

    def logits(self) -> LogitArray:
        return floats_at(self._logits, self._inputs.num_samples, self._config.vocab_size)

    def keep_logits(self) -> None:
        self._sampling_inputs.keeps_logits = True
        self._sampling_inputs.greedy[:] = 0

    def profile(self) -> list[tuple[str, float]]:
        """Compute the step in the inputs. Returns each op's name and seconds."""
        inputs, library = self._inputs, self._library
        seconds = np.zeros(library.program_size(self._handle), np.float64)
        sizes = inputs.num_tokens, inputs.num_rows, inputs.num_samples
        library.program_profile(self._handle, *sizes, seconds.ctypes.data)
        names = [library.program_name(self._handle, i).decode() for i in range(len(seconds))]
        return list(zip(names, seconds.tolist(), strict=True))

    def costs(self) -> list[tuple[float, float, bool]]:
        """For each op of the step in the inputs: bytes that it must move, operations, whether they are on integers."""
        inputs, library, out = self._inputs, self._library, (ctypes.c_double * 3)()
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
            self._attention.pages.close()
            self._thread_pool.close()
            self._memory.free()
            self._swap = None

    def _feed_forward(self, weights: MlpWeights, slot: int = 0, *, stays: bool = False) -> None:
        """Record the feed-forward layer after its norm, which wrote to `slot`. `stays`: see `NativeLayers.add`."""
        config = self._config
        inner, activation = weights.down.matrices[0].num_columns, native.ACTIVATIONS[config.activation]
        part = self._share.inner if self._share.num_ranks > 1 else range(inner)
        rows, floats = self._layers.written(self._gated, inner, weights.down.matrices[0], part.start)
        if config.gated:
            one_format = have_one_format(weights.gate_up.matrices)
            order = swiglu_order(inner, part) if one_format else np.concatenate([rows_of(part), inner + rows_of(part)])
            products = self._memory.products(weights.gate_up, order, partial(self._norms.rows, slot=slot))
            self._layers.adapt(gate_up(config), weights.gate_up, config.hidden_size, slot, interleaved=one_format)
            self._library.program_swiglu(self._handle, rows, floats, products, len(products), activation)
        else:
            products = self._memory.products(weights.gate_up, rows_of(part), partial(self._norms.rows, slot=slot))
            self._layers.adapt(gate_up(config), weights.gate_up, config.hidden_size, slot)
            xielu = native.NativeXieluForm(*(weights.xielu or ()))
            self._library.program_activate(
                self._handle, rows, floats, products, len(products), activation, len(part), xielu
            )
        self._layers.barrier("gate_up")
        how = weights.post_norm, DOWN, "down"
        self._layers.add(self._gated, inner, weights.down, *how, scale=weights.residual_scale, stays=stays)
