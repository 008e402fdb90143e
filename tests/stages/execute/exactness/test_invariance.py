"""A request's text is the same, id by id, whatever the scheduler does: alone, batched, in chunks, with a cached prefix,
forked, preempted in either mode. Uses the real scheduler and this machine's CPU program."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute import checkpoints
from tests.stages.execute.native_driver import random_ids, write
from tests.stages.execute.pair import GREEDY, Pair, Request, make_runner

MANY, FEW, ALONE = 160, 22, 16
"""KV blocks: for all requests at once, for a few of them, and for one."""

PREFIX = random_ids(53, 99)
LENGTHS = (1, 2, 15, 16, 17, 31, 40, 64, 97, 120)


def make_requests() -> list[Request]:
    """Prompts of all lengths; some share their first three blocks, two are equal; most are greedy, some are sampled."""
    prompts = [random_ids(num, num) for num in LENGTHS]
    prompts += [PREFIX + random_ids(num, num) for num in (3, 30, 11)] + [PREFIX + random_ids(3, 3)]
    return [Request(tuple(prompt), 20 + 7 * (i % 5), seed=GREEDY if i % 4 else i) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write(folder, checkpoints.config_of())
    return folder


class Machine:
    """Runners with more and with less memory, each loaded once; their blocks contain what earlier tests wrote."""

    def __init__(self, folder: Path, kv_dtype: str = "auto") -> None:
        self._folder, self._kv_dtype = folder, kv_dtype
        self._block_bytes = block_bytes(3, 2, 16, 1 if kv_dtype == "int8" else 2)
        self._runners: list[CpuRunner] = []
        self.alone = cache(self._alone)

    @cache  # noqa: B019 - as long as the tests
    def runner(self, num_blocks: int, num_swap_blocks: int = 0) -> CpuRunner:
        runner = make_runner(
            self._folder, self._block_bytes, num_blocks, num_swap_blocks=num_swap_blocks, kv_dtype=self._kv_dtype
        )
        assert isinstance(runner.program, NativeProgram)
        self._runners.append(runner)
        return runner

    def _alone(self, encoded: bytes) -> list[list[int]]:
        """The texts of a request that runs alone: one sequence after the other, each prompt in one chunk, no prefix
        cache, depth 1."""
        pair = Pair(self.runner(ALONE), prefix_caching=False, max_num_seqs=1)
        (texts,) = pair.run([msgspec.msgpack.decode(encoded, type=Request)])
        assert pair.scheduler.load().num_preemptions == 0
        return texts

    def close(self) -> None:
        for runner in self._runners:
            runner.close()


@pytest.fixture(scope="module")
def machine(folder: Path) -> Iterator[Machine]:
    machine = Machine(folder)
    yield machine
    machine.close()


def alone(machine: Machine, request: Request) -> list[list[int]]:
    return machine.alone(msgspec.msgpack.encode(msgspec.structs.replace(request, at_step=0, priority=0)))


def run(machine: Machine, pair: Pair, requests: list[Request]) -> m.ScheduleLoad:
    """Compare all texts with those of each request alone. Returns the scheduler's counts."""
    texts = pair.run(requests)
    for request, found in zip(requests, texts, strict=True):
        assert [len(text) for text in found] == [request.max_tokens] * request.n
        assert found == alone(machine, request), f"behind {len(request.prompt)} ids"
    return pair.scheduler.load()


def test_the_compared_texts_differ(machine: Machine) -> None:
    texts = {tuple(alone(machine, request)[0]) for request in make_requests()}
    assert len(texts) == len(make_requests())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 33, 96, 256])
def test_batched_in_chunks_of_any_size(
    machine: Machine, depth: int, prefix_caching: bool, max_num_batched_tokens: int
) -> None:
    limits = {"prefix_caching": prefix_caching, "max_num_batched_tokens": max_num_batched_tokens}
    pair = Pair(machine.runner(MANY), depth, **limits)
    load = run(machine, pair, make_requests())
    assert load.num_preemptions == 0
    assert (load.num_cached_tokens > 0) == prefix_caching


@pytest.mark.parametrize("depth", [1, 2])
def test_with_prefixes_cached_by_earlier_requests(machine: Machine, depth: int) -> None:
    """In the second run every prompt is cached; in the third, prompts continue with generated ids."""
    pair = Pair(machine.runner(MANY), depth)
    first = run(machine, pair, make_requests())
    second = run(machine, pair, make_requests())
    whole_blocks = sum((len(request.prompt) - 1) // 16 * 16 for request in make_requests())
    assert second.num_cached_tokens - first.num_cached_tokens == whole_blocks
    longer = [Request((*request.prompt, *alone(machine, request)[0], 7), 12) for request in make_requests()]
    third = run(machine, pair, longer)
    assert third.num_cached_tokens - second.num_cached_tokens > whole_blocks, "generated blocks are cached too"


@pytest.mark.parametrize("depth", [1, 2])
def test_in_any_order_of_arrival(machine: Machine, depth: int) -> None:
    """Requests arrive one after the other, some while others run, in several orders."""
    for seed in range(3):
        random = np.random.default_rng(seed)
        requests = [
            Request(request.prompt, request.max_tokens, request.seed, at_step=int(random.integers(0, 120)))
            for request in (make_requests()[i] for i in random.permutation(len(make_requests())))
        ]
        run(machine, Pair(machine.runner(MANY), depth, max_num_batched_tokens=48, max_num_seqs=5), requests)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [33, 256])
def test_preempted_and_recomputed(
    machine: Machine, depth: int, prefix_caching: bool, max_num_batched_tokens: int
) -> None:
    limits: dict[str, Any] = {
        "prefix_caching": prefix_caching,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    load = run(machine, Pair(machine.runner(FEW), depth, **limits), make_requests())
    assert load.num_preemptions > 0 and load.num_blocks_swapped_out == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [33, 256])
@pytest.mark.parametrize("num_swap_blocks", [60, 6])
def test_preempted_and_swapped_in(
    machine: Machine, depth: int, prefix_caching: bool, max_num_batched_tokens: int, num_swap_blocks: int
) -> None:
    """With swap space for every sequence, and with so little that most are recomputed."""
    limits: dict[str, Any] = {
        "prefix_caching": prefix_caching,
        "max_num_batched_tokens": max_num_batched_tokens,
        "preemption": "swap",
        "kv_offload": False,
    }
    load = run(machine, Pair(machine.runner(FEW, num_swap_blocks), depth, **limits), make_requests())
    assert load.num_preemptions > 0 and load.num_blocks_swapped_out > 0
    if prefix_caching:
        assert load.num_blocks_swapped_in <= load.num_blocks_swapped_out, "some are still in the prefix cache"
    else:
        assert load.num_blocks_swapped_in == load.num_blocks_swapped_out
    assert load.num_swap_blocks_free == load.num_swap_blocks_total == num_swap_blocks


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("num_swap_blocks", [200, 20])
def test_offloaded_and_restored(machine: Machine, depth: int, preemption: str, num_swap_blocks: int) -> None:
    """Each prompt comes again when the KV cache has evicted its blocks, with swap space for all blocks, and for few."""
    requests = [
        Request(request.prompt, request.max_tokens, request.seed, at_step=at_step)
        for at_step in (0, 150)
        for request in make_requests()
    ]
    limits: dict[str, Any] = {"max_num_batched_tokens": 96, "preemption": preemption}
    load = run(machine, Pair(machine.runner(FEW, num_swap_blocks), depth, **limits), requests)
    assert load.num_preemptions > 0
    assert load.num_blocks_offloaded > 0
    assert num_swap_blocks == 20 or load.num_blocks_restored > 0
    assert load.num_swap_blocks_free == load.num_swap_blocks_total


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("memory", [(MANY, 0), (FEW, 0), (FEW, 60)], ids=["enough", "recomputed", "swapped"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_samples_that_fork_from_one_prompt(
    machine: Machine, depth: int, memory: tuple[int, int], prefix_caching: bool
) -> None:
    """Each sample has the text that it has if it computes the prompt itself, with its own random numbers."""
    requests = [
        Request(request.prompt, request.max_tokens, seed=i if i % 3 else GREEDY, n=2 + i % 3, at_step=3 * i)
        for i, request in enumerate(make_requests())
    ]
    sampled_texts = {tuple(text) for request in requests if request.seed != GREEDY for text in alone(machine, request)}
    assert len(sampled_texts) == sum(request.n for request in requests if request.seed != GREEDY)
    limits: dict[str, Any] = {"prefix_caching": prefix_caching, "max_num_batched_tokens": 96, "preemption": "swap"}
    limits["kv_offload"] = False
    if not memory[1]:
        limits["preemption"] = "recompute"
    load = run(machine, Pair(machine.runner(*memory), depth, **limits), requests)
    assert load.num_forks > 0
    assert (load.num_preemptions > 0) == (memory[0] == FEW)
    assert (load.num_blocks_swapped_in > 0) == (memory[1] > 0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "rules",
    [
        {"policy": "priority", "preemption": "swap", "kv_offload": False},
        {"policy": "priority", "preemption": "recompute"},
        {"policy": "longest-prefix-match", "preemption": "auto"},
        {"preemption": "auto", "long_prompt_tokens": 50, "long_prompt_max_slowdown": 1.5},
        {"preemption": "swap", "kv_offload": False, "max_step_s": 1e-6},
    ],
    ids=lambda rules: ", ".join(map(str, rules.values())),
)
def test_with_every_policy(machine: Machine, depth: int, rules: dict[str, Any]) -> None:
    """Priorities that preempt, chunks by predicted time, any order: the order changes no text."""
    random = np.random.default_rng(depth)
    requests = [
        Request(
            request.prompt,
            request.max_tokens,
            request.seed,
            n=1 + i % 2,
            at_step=int(random.integers(0, 60)),
            priority=int(random.integers(0, 4)),
        )
        for i, request in enumerate(make_requests())
    ]
    load = run(machine, Pair(machine.runner(FEW - 4, 30), depth, **rules), requests)
    assert load.num_preemptions > 0
    assert rules["preemption"] != "swap" or load.num_blocks_swapped_in > 0
    assert rules["preemption"] != "recompute" or load.num_blocks_swapped_out == 0


def token_outputs_of(**fields: Any) -> tuple[tuple[str, Any], ...]:
    return tuple({"num_logprobs": 0, **fields}.items())


def few_ids(seed: int) -> bytes:
    """Most of the vocabulary."""
    kept = np.random.default_rng(seed).random(checkpoints.VOCAB_SIZE) < 0.7
    return np.flatnonzero(kept).astype(np.int32).tobytes()


FIRST = [[m.BEGIN, token] for token in range(0, checkpoints.VOCAB_SIZE, 2)]
"""Half of the vocabulary is not first."""
FEATURES = [
    (),
    token_outputs_of(),
    token_outputs_of(num_logprobs=4),
    token_outputs_of(num_logprobs=2, num_prompt_logprobs=3, repetition_penalty=1.3),
    (("presence_penalty", 0.6), ("frequency_penalty", 0.4), ("num_prompt_logprobs", 0)),
    (("min_tokens", 9), ("allowed_ids", few_ids(1)), ("bias_ids", [7, 80, 123]), ("bias_values", [3.0, 5.0, -4.0])),
    token_outputs_of(num_logprobs=1, bad_words_ids=[[5], [17, 90], [4, 4, 4], *FIRST], frequency_penalty=1.5),
    token_outputs_of(num_logprobs=checkpoints.VOCAB_SIZE, allowed_ids=few_ids(2), num_prompt_logprobs=1),
]


def make_requests_with_features() -> list[Request]:
    """Each feature, greedy and sampled, with and without n."""
    return [
        Request(
            request.prompt,
            request.max_tokens,
            request.seed if i % 3 else i,
            n=1 + i % 3,
            fields=FEATURES[i % len(FEATURES)],
        )
        for i, request in enumerate(make_requests())
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("memory", [(MANY, 0), (FEW, 0), (FEW, 60)], ids=["enough", "recomputed", "swapped"])
def test_sampling_features_work_the_same_in_any_batch(machine: Machine, depth: int, memory: tuple[int, int]) -> None:
    """Ids and records are bit-identical: alone, in a batch with other features or none, in chunks, forked, preempted in
    either mode."""
    requests = make_requests_with_features()
    limits: dict[str, Any] = {"max_num_batched_tokens": 96, "preemption": "swap" if memory[1] else "recompute"}
    limits["kv_offload"] = False
    pair = Pair(machine.runner(*memory), depth, **limits)
    load = run(machine, pair, requests)
    assert (load.num_preemptions > 0) == (memory[0] == FEW)
    assert (load.num_blocks_swapped_in > 0) == (memory[1] > 0)
    for i, request in enumerate(requests, 1):
        lonely = Pair(machine.runner(ALONE), prefix_caching=False, max_num_seqs=1)
        lonely.run([request])
        for index in range(request.n):
            token_outputs, prompts = pair.token_outputs[i, index], pair.prompt_logprobs[i, index]
            assert token_outputs == lonely.token_outputs[1, index]
            assert len(token_outputs) == request.max_tokens * request.token_output_bytes(machine.runner(ALONE).facts)
            assert prompts == lonely.prompt_logprobs[1, index]
            assert len(prompts) == (len(request.prompt) - 1) * request.prompt_logprob_bytes * (index == 0)


def test_sampling_features_change_texts(machine: Machine) -> None:
    """Shows that the test above compares something. Only logprobs change no text."""
    for request in make_requests_with_features():
        plain = Request(request.prompt, request.max_tokens, request.seed, request.n)
        only_token_outputs = all(name == "num_logprobs" for name, _ in request.fields)
        assert (alone(machine, request) == alone(machine, plain)) == only_token_outputs


@pytest.mark.parametrize("depth", [1, 2])
def test_embeddings_are_the_same_in_any_batch(machine: Machine, depth: int) -> None:
    """Bit-identical, also if a prompt is computed in other chunks."""
    requests = [
        Request(
            request.prompt,
            1 if i % 3 else request.max_tokens,
            fields=(("pooling", 1 + i % 2),) if i % 3 else FEATURES[i % 4],
        )
        for i, request in enumerate(make_requests())
    ]
    for limits in ({"max_num_batched_tokens": 17}, {"max_num_batched_tokens": 256}, {"max_num_seqs": 3}):
        pair = Pair(machine.runner(MANY), depth, **limits)
        pair.run(requests)
        for i, request in enumerate(requests, 1):
            lonely = Pair(machine.runner(ALONE), prefix_caching=False, max_num_seqs=1)
            lonely.run([request])
            assert pair.token_outputs[i, 0] == lonely.token_outputs[1, 0]
            if request.options.pooling:
                vector = np.frombuffer(pair.token_outputs[i, 0], np.float32)
                assert len(vector) == 48 and np.isfinite(vector).all() and vector.std() > 0.1


@pytest.mark.parametrize("depth", [1, 2])
def test_the_last_tokens_embedding_needs_no_more_than_the_end_of_a_known_prompt(machine: Machine, depth: int) -> None:
    """As of the documents of a query, behind which a reranker's prompt begins alike."""
    prompts = [(*PREFIX, *random_ids(5 + i, i)) for i in range(6)]
    for pooling, num_cached in ((2, 5 * (len(PREFIX) // 16) * 16), (1, 0)):
        requests = [Request(prompt, 1, fields=(("pooling", pooling),)) for prompt in prompts]
        pair = Pair(machine.runner(MANY), depth, max_num_seqs=1, max_num_batched_tokens=17)
        pair.run(requests)
        assert pair.scheduler.load().num_cached_tokens == num_cached
        lonely = Pair(machine.runner(ALONE), prefix_caching=False, max_num_seqs=1)
        lonely.run(requests)
        assert pair.token_outputs == lonely.token_outputs and len({*pair.token_outputs.values()}) == len(prompts)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_swap_blocks", [0, 60])
def test_a_prompt_preempted_half_way_has_the_same_prompt_logprobs(
    machine: Machine, depth: int, num_swap_blocks: int
) -> None:
    """Earlier texts grow until memory runs out, while each step computes a few of its ids."""
    texts = [Request(tuple(random_ids(15, seed)), 45, fields=token_outputs_of(num_logprobs=2)) for seed in range(5)]
    all_fields: list[tuple[tuple[str, Any], ...]] = [
        (("pooling", 1),),
        (("pooling", 2),),
        token_outputs_of(num_prompt_logprobs=2),
    ]
    for fields in all_fields:
        whole = Request(tuple(random_ids(120, 9)), 1, at_step=2, fields=fields)
        limits: dict[str, Any] = {"max_num_batched_tokens": 8, "preemption": "swap" if num_swap_blocks else "recompute"}
        pair = Pair(machine.runner(FEW, num_swap_blocks), depth, **limits)
        pair.run([*texts, whole])
        assert pair.scheduler.load().num_preemptions > 0
        lonely = Pair(machine.runner(ALONE), prefix_caching=False, max_num_seqs=1)
        lonely.run([whole])
        assert pair.token_outputs[6, 0] == lonely.token_outputs[1, 0] != b""
        logprobs = pair.prompt_logprobs.get((6, 0), b"")
        assert logprobs == lonely.prompt_logprobs.get((1, 0), b"")
        assert len(logprobs) == (119 * 20 if whole.prompt_logprob_bytes else 0)


def test_a_sequence_without_a_possible_id_ends_with_an_error_and_others_continue(machine: Machine) -> None:
    nothing = [(token,) for token in range(checkpoints.VOCAB_SIZE)]
    ends = Request(tuple(PREFIX), 9, fields=token_outputs_of(bad_words_ids=[list(run) for run in nothing]))
    follows = [
        Request(request.prompt, request.max_tokens, fields=token_outputs_of()) for request in make_requests()[:5]
    ]
    for depth in (1, 2):
        pair = Pair(machine.runner(MANY), depth)
        texts = pair.run([*follows[:2], ends, *follows[2:]])
        assert texts.pop(2) == [[]] and list(pair.errors) == [(3, 0)] and pair.token_outputs[3, 0] == b""
        assert "No token can be sampled" in pair.errors[3, 0]
        assert [texts[i] for i in range(5)] == [alone(machine, request) for request in follows]
