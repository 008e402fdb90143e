"""Measures steps. The cases of a plan take turns in rounds, so that a drift of the machine affects all of them."""

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import cast

import msgspec
import numpy as np

from pipeline.cli.profile.results import Case, MachineRates, OpTime, Profile, ProfilePlan, StepTime
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.cpu import peaks
from pipeline.kernels.cpu.compiler import BuildError
from pipeline.kernels.cpu.isa import Isa, available
from pipeline.kernels.sampling.logprob_inputs import ScoreInputs
from pipeline.kernels.sampling.sampling_inputs import SamplingInputs
from pipeline.kernels.step_inputs import IntArray, StepInputs
from pipeline.runtime.model.kv_groups import undivided
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.shm.available import available_bytes
from pipeline.stages.execute.adapters.slots import LoraPlan
from pipeline.stages.execute.cpu.backend import choose_library, make_program
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.precision import with_activations
from pipeline.stages.execute.cpu.program import Program, ProgramPlan
from pipeline.stages.execute.kv import KVPlan, kv_block_bytes, kv_dtype
from pipeline.stages.execute.measuring.cases import check_positions, cpu_name, floor_of, num_blocks_of
from pipeline.stages.execute.measuring.plain_adapter import plain_adapter
from pipeline.stages.execute.models.registry import build_program
from pipeline.stages.execute.program import AnyMatrix, AnyVector
from pipeline.stages.execute.weights import Weights
from pipeline.version import VERSION

PEAK_S = 1.5
"""Approximate duration of each of the two measurements of the machine."""
VISIT_S = 0.05
"""A short step is repeated for this time in each turn."""

OpCost = tuple[float, float, bool]
"""Bytes, operations, and whether they are on integers, of one op; see `NativeProgram.costs`."""


@dataclass(slots=True)
class CpuSamples:
    """Measurements of one case."""

    op_names: list[str] = field(default_factory=list)
    op_costs: list[OpCost] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    ops_s: list[list[float]] = field(default_factory=list)
    """[steps timed by op][ops]"""
    against_s: list[float] = field(default_factory=list)


def measure(settings: Settings, config: ModelConfig, weights: Weights, plan: ProfilePlan, num_threads: int) -> Profile:
    """Measure the steps of a plan. Raises UserError if the model can't run with these settings, or the plan does not
    fit it."""
    log = logging.getLogger("pipeline")
    cases = plan.cases()
    check_positions(cases, config, config.max_position)
    max_num_samples = max(case.num_samples for case in cases)
    inputs = StepInputs(
        max(case.num_tokens for case in cases),
        max(case.num_seqs for case in cases),
        max(num_blocks_of(case) // case.num_seqs for case in cases),
        max_num_samples=max_num_samples,
    )
    sampling_inputs, scores = SamplingInputs(max_num_samples, config.vocab_size), ScoreInputs(inputs.max_num_rows)
    chosen = [settings]
    if plan.against is not None:
        other = msgspec.structs.replace(settings.execute, kernels=plan.against)
        chosen.append(msgspec.structs.replace(settings, execute=other))
    kv = _plan_kv(settings, config, cases, len(chosen))
    counted = CountedWeights(weights)
    with ExitStack() as stack:
        programs = []
        for each in chosen:
            log.info("loading %s for execute.kernels=%s", config.name, each.execute.kernels)
            library = choose_library(each, config)
            each = with_activations(each, weights, library)
            program_plan = ProgramPlan(
                settings=each,
                config=config,
                inputs=inputs,
                sampling_inputs=sampling_inputs,
                scores=scores,
                kv=kv,
                num_threads=num_threads,
                lora=LoraPlan.of(each),
            )
            program = stack.enter_context(closing(make_program(library, program_plan)))
            counted.num_bytes.clear()
            build_program(config, cast(Weights, counted), program)
            if LoraPlan.of(each) is not None:
                program.put_adapter(0, program.pack_adapter(plain_adapter(each, config)))
            programs.append(program)
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        native = isinstance(programs[0], NativeProgram)
        before = _rates(settings, num_threads, log) if native else None
        samples = run_rounds(
            *(programs, inputs, cases, kv, plan.rounds, config.vocab_size, log),
            with_adapter=settings.lora.is_on,
        )
        after = _rates(settings, num_threads, log) if native else None
        rates = before.best(after) if before and after else None
        return Profile(
            version=VERSION,
            model=config.name,
            weight_bytes=dict(counted.num_bytes),
            kv_dtype=kv_dtype(settings.execute),
            kernels=programs[0].name,
            cpu=cpu_name(),
            num_threads=num_threads,
            plan=plan,
            before=before,
            after=after,
            steps=[summarize(case, samples[i], rates) for i, case in enumerate(cases)],
            against=programs[1].name if plan.against else None,
        )


# -------------------------------------------------------------------------------------------------------- measuring


def run_rounds(
    programs: Sequence[Program],
    inputs: StepInputs,
    cases: Sequence[Case],
    kv: KVPlan,
    num_rounds: int,
    vocab_size: int,
    log: logging.Logger,
    *,
    with_adapter: bool = False,
) -> list[CpuSamples]:
    """Each case's samples. Every round runs all cases, with one program after the other. The first round, one step of
    each, is not counted."""
    samples = [CpuSamples() for _ in cases]
    random = np.random.default_rng(0)
    # A sequence's blocks are scattered, as in a server that has run for a while.
    blocks: IntArray = random.permutation(kv.num_blocks).astype(np.int32)
    ids: IntArray = random.integers(0, vocab_size, inputs.max_num_tokens, np.int32)
    for number in range(num_rounds + 1):
        begun_s = time.perf_counter()
        for i, case in enumerate(cases):
            fill(inputs, case, ids, blocks, with_adapter=with_adapter)
            for j, program in enumerate(programs):
                if number == 0:
                    program.run()
                elif j == 0:
                    _visit(program, samples[i])
                else:
                    samples[i].against_s += [_timed(program.run) for _ in _visit_steps()]
        what = f"round {number} of {num_rounds}" if number else "warmed up"
        log.info("%s took_s=%.1f", what, time.perf_counter() - begun_s)
    return samples


def fill(inputs: StepInputs, case: Case, ids: IntArray, blocks: IntArray, *, with_adapter: bool = False) -> None:
    """Fill `inputs` with the step of a case. There are at least as many `ids` and `blocks` as it needs. Each sequence
    has its own blocks, and its last token is sampled, or all that are verified. `with_adapter`: all use the adapter in
    slot 0."""
    starts = np.full(case.num_seqs, case.context - case.num_new, np.int32)
    counts = np.full(case.num_seqs, case.num_new, np.int32)
    tables = blocks[: num_blocks_of(case)].reshape(case.num_seqs, -1)
    samples = np.full(case.num_seqs, case.num_samples // case.num_seqs)
    inputs.fill(ids[: case.num_tokens], starts, counts, tables, samples)
    inputs.fill_adapters(np.full(case.num_seqs, 0 if with_adapter else -1, np.int32))
    states = np.arange(case.num_seqs, dtype=np.int32)
    inputs.state_reads[: case.num_seqs] = states if case.context > case.num_new else -1
    inputs.state_writes[: case.num_seqs] = states


def _visit(program: Program, samples: CpuSamples) -> None:
    """One turn of a case: whole steps, alternating with steps that are timed by op if the program supports it."""
    for _ in _visit_steps():
        samples.steps_s.append(_timed(program.run))
        if isinstance(program, NativeProgram):
            ops = program.profile()
            samples.ops_s.append([seconds for _, seconds in ops])
            samples.op_names = [name for name, _ in ops]
    if isinstance(program, NativeProgram):
        samples.op_costs = program.costs()


def _visit_steps() -> Iterator[None]:
    """Yields at least once, until the turn is over."""
    end_s = time.perf_counter() + VISIT_S
    yield
    while time.perf_counter() < end_s:
        yield


def _timed(step: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    step()
    return time.perf_counter() - begun_s


def _rates(settings: Settings, num_threads: int, log: logging.Logger) -> MachineRates:
    """Measure the machine. Raises UserError on failure."""
    wanted = settings.execute.kernels
    assert wanted != "torch"
    isa: Isa = available()[0] if wanted == "auto" else wanted
    root = Path(settings.cache_dir).expanduser() if settings.cache_dir else None
    log.info("measuring this machine threads=%d", num_threads)
    try:
        found = peaks.measure(isa, num_threads, PEAK_S, log.info, cache_root=root)
    except (BuildError, OSError) as error:
        raise UserError(f"cannot measure this machine: {error}") from error
    return MachineRates(found.read_bytes_per_s, found.float32_flop_per_s, found.bf16_flop_per_s, found.int8_op_per_s)


# ------------------------------------------------------------------------------------------------------- summarizing


def summarize(case: Case, samples: CpuSamples, rates: MachineRates | None) -> StepTime:
    """Medians of a case's samples, and lower bounds if the machine's rates are known."""
    step_s = median(samples.steps_s)
    ops: list[OpTime] = []
    in_turn = overlapped = None
    if rates is not None:
        floors_s = [floor_s(cost, rates) for cost in samples.op_costs]
        ops = _op_times(samples, floors_s)
        in_turn = floor_of(sum(floors_s), step_s)
        overlapped = floor_of(overlapped_s(samples.op_costs, rates), step_s)
    against_s = median(samples.against_s) if samples.against_s else None
    return StepTime(
        case=case,
        ms=step_s * 1e3,
        num_samples=len(samples.steps_s),
        tokens_per_s=case.num_tokens / step_s,
        ops=ops,
        in_turn=in_turn,
        overlapped=overlapped,
        against_ms=None if against_s is None else against_s * 1e3,
        speedup=None if against_s is None else against_s / step_s,
    )


def floor_s(cost: OpCost, rates: MachineRates) -> float:
    """Least seconds of one op: by bytes or by operations, whichever takes longer."""
    num_bytes, operations, is_integer = cost
    rate = rates.int8_ops if is_integer else rates.bf16_flops
    assert rate is not None, "these rates are of a machine without integer matmuls"
    return max(num_bytes / rates.read_bytes, operations / rate)


def overlapped_s(costs: Sequence[OpCost], rates: MachineRates) -> float:
    """Least seconds of all ops if data movement and computation overlapped completely."""
    bytes_s = sum(num_bytes for num_bytes, _, _ in costs) / rates.read_bytes
    return max(bytes_s, sum(floor_s((0.0, operations, is_integer), rates) for _, operations, is_integer in costs))


def _op_times(samples: CpuSamples, floors_s: Sequence[float]) -> list[OpTime]:
    """Ops grouped by name and kind, in the order of their first appearance."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for i, (name, (_, _, is_integer)) in enumerate(zip(samples.op_names, samples.op_costs, strict=True)):
        groups.setdefault((name, is_integer), []).append(i)
    times = []
    for (name, is_integer), members in groups.items():
        seconds = median(sum(ops[i] for i in members) for ops in samples.ops_s)
        num_bytes = sum(samples.op_costs[i][0] for i in members)
        operations = sum(samples.op_costs[i][1] for i in members)
        per_s = 1 / seconds if seconds else 0.0
        times.append(
            OpTime(
                name=name,
                is_integer=is_integer,
                count=len(members),
                ms=seconds * 1e3,
                bytes=num_bytes,
                operations=operations,
                gb_per_s=num_bytes * per_s / 1e9,
                gflop_per_s=operations * per_s / 1e9,
                floor=floor_of(sum(floors_s[i] for i in members), seconds),
            )
        )
    return times


# ---------------------------------------------------------------------------------------------------------- loading


class CountedWeights:
    """Wraps `Weights` and counts the bytes of the matrices that a model loads, by format."""

    def __init__(self, weights: Weights) -> None:
        self.num_bytes: Counter[str] = Counter()
        self._weights = weights

    def matrix(self, name: str, rows: int, columns: int) -> AnyMatrix:
        matrix = self._weights.matrix(name, rows, columns)
        self.num_bytes[matrix.format] += matrix.data.nbytes
        return matrix

    def matrices(self, names: Sequence[str], rows: Sequence[int], columns: int) -> tuple[AnyMatrix, ...]:
        return tuple(self.matrix(name, num, columns) for name, num in zip(names, rows, strict=True))

    def vector(self, name: str, size: int) -> AnyVector:
        return self._weights.vector(name, size)

    def floats(self, name: str, shape: tuple[int, ...]) -> AnyVector:
        return self._weights.floats(name, shape)

    def join_vectors(self, names: Sequence[str], sizes: Sequence[int]) -> AnyVector:
        return self._weights.join_vectors(names, sizes)


def _plan_kv(settings: Settings, config: ModelConfig, cases: Sequence[Case], num_programs: int) -> KVPlan:
    """A plan with as much KV memory as the largest case needs. Raises UserError if too little is free."""
    num_blocks = max(num_blocks_of(case) for case in cases)
    wanted = num_blocks * kv_block_bytes(settings.execute, config) * num_programs
    free = available_bytes()
    if wanted > free:
        raise UserError(
            f"these steps need {wanted} bytes of KV memory, but only {free} bytes of memory are free: lower "
            "--batch, --context or --prefill"
        )
    num_slots = max(case.num_seqs for case in cases) if config.has_states else 0
    return KVPlan(num_blocks, max(case.context for case in cases), undivided(config.num_layers), num_slots)
