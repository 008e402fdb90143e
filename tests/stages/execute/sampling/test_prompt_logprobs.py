"""Log probabilities of outputs and prompts, and embeddings, agree with transformers: in both back ends, in chunks and
in batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from pipeline.runtime import messages as m
from pipeline.runtime.token_outputs import logprob_dtype
from tests.stages.execute import checkpoints
from tests.stages.execute.checkpoints import VOCAB_SIZE
from tests.stages.execute.cpu.native_models import MAX_ERROR, max_error
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.native_driver import ISAS, Native, random_ids, write

PROMPTS = [random_ids(num, num) for num in (1, 2, 17, 40, 70)]
HIDDEN = 48


class RoundedCache(DynamicCache):
    """Keys and values in bfloat16."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
        keys, values = (one.bfloat16().to(one.dtype) for one in (key_states, value_states))
        return super().update(keys, values, *rest, **more)


class Executor:
    """A driver, and the transformers model with the same weights."""

    def __init__(self, driver: Driver, model: Any, tolerance: float, rounds_kv: bool = False) -> None:
        self.driver = driver
        self._rounds_kv = rounds_kv
        """Whether the transformers model has bfloat16 keys and values, as the CPU library does"""
        self.tolerance = tolerance
        """Of log probabilities and hidden states, either in float32 or rounded to bfloat16"""
        self._model = model

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """[len(ids), V]: at each position, those of the next id."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([ids]), past_key_values=self._cache()).logits[0]
        return torch.log_softmax(logits.double(), dim=-1).numpy()

    def _cache(self) -> DynamicCache:
        return RoundedCache() if self._rounds_kv else DynamicCache()

    def states(self, ids: list[int]) -> np.ndarray:
        """[len(ids), HIDDEN]: after the last norm."""
        with torch.inference_mode():
            states = self._model.model(torch.tensor([ids]), past_key_values=self._cache()).last_hidden_state
        return states[0].double().numpy()

    def prompts(self, options: list[m.GenerationOptions], chunk: int = 128, index: int = 0) -> list[Any]:
        """Compute each of PROMPTS, with its options, in chunks of at most `chunk` tokens. Returns each step's
        result."""
        driver = self.driver
        driver.clear()
        adds = [
            row_add(row, ids, driver.take_blocks(len(ids) + 1), options[row % len(options)], index=index)
            for row, ids in enumerate(PROMPTS)
        ]
        results, computed = [], [0] * len(PROMPTS)
        while any(done < len(ids) for done, ids in zip(computed, PROMPTS, strict=True)):
            entries, left = [], 128
            for row, ids in enumerate(PROMPTS):
                if count := min(chunk, left, len(ids) - computed[row]):
                    entries.append((row, computed[row], count, computed[row] + count == len(ids)))
                    computed[row] += count
                    left -= count
            results.append((entries, driver.step(entries, adds=adds)))
            adds = []
        return results


@pytest.fixture(scope="module", params=["torch", "torch, bfloat16", *ISAS])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    config = checkpoints.config_of()
    if request.param == "torch":
        model = checkpoints.write(folder, config)
        made = Executor(Driver(folder, settings()), model, 1e-4)
    else:
        write(folder, config)
        model = checkpoints.reference_model(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(parameter.bfloat16().float())
        if request.param == "torch, bfloat16":
            driver = Driver(folder, settings(dtype="bfloat16", kernels="torch"))
        else:
            driver = Native(folder, request.param, keep_logits=False, max_num_seqs=8)
        tolerance = MAX_ERROR["bf16"] if request.param == "torch, bfloat16" else max_error(request.param)
        made = Executor(driver, model, tolerance, rounds_kv=request.param != "torch, bfloat16")
    yield made
    made.driver.runner.close()


def options_of(**fields: Any) -> m.GenerationOptions:
    return m.GenerationOptions(**{"temperature": 0.0, "ignore_eos": True, **fields})


def assert_token_output(executor: Executor, record: Any, logprobs: np.ndarray, token: int) -> None:
    """One record, of an id after a position with these log probabilities [V]."""
    tolerance = executor.tolerance
    np.testing.assert_allclose(record["logprob"], logprobs[token], rtol=0, atol=tolerance)
    top_ids, top = record["top_ids"], record["top_logprobs"]
    np.testing.assert_allclose(top, logprobs[top_ids], rtol=0, atol=tolerance)
    np.testing.assert_allclose(top, np.sort(logprobs)[::-1][: len(top)], rtol=0, atol=tolerance)
    assert len(set(top_ids.tolist())) == len(top_ids) and (np.diff(top) <= 0).all()
    if token in top_ids:
        assert record["logprob"] == top[top_ids.tolist().index(token)]


@pytest.mark.parametrize("chunk", [128, 16, 7, 1])
def test_prompt_logprobs_agree_with_transformers(executor: Executor, chunk: int) -> None:
    """Some rows request none, and a step has more positions than there are rows for logits."""
    tops = [3, -1, 0, VOCAB_SIZE, 5]
    token_outputs: list[list[Any]] = [[] for _ in PROMPTS]
    for entries, result in executor.prompts([options_of(num_prompt_logprobs=num) for num in tops], chunk):
        data = result.prompt_logprobs.tobytes()
        for row, start, count, _ in entries:
            num = max(0, min(start + count, len(PROMPTS[row]) - 1) - start) if tops[row] >= 0 else 0
            dtype = logprob_dtype(max(0, tops[row]))
            token_outputs[row] += list(np.frombuffer(data[: num * dtype.itemsize], dtype))
            data = data[num * dtype.itemsize :]
        assert not data
    for row, ids in enumerate(PROMPTS):
        assert len(token_outputs[row]) == (len(ids) - 1 if tops[row] >= 0 else 0)
        logprobs = executor.logprobs(ids)
        for index, record in enumerate(token_outputs[row]):
            assert_token_output(executor, record, logprobs[index], ids[index + 1])


def test_chunks_have_bit_identical_prompt_logprobs(executor: Executor) -> None:
    """If products have the same bits in any batch, which torch does not guarantee."""
    if not isinstance(executor.driver, Native):
        return
    texts = []
    for chunk in (128, 16, 7):
        token_outputs: dict[int, bytes] = {}
        for entries, result in executor.prompts([options_of(num_prompt_logprobs=2)], chunk):
            data = result.prompt_logprobs.tobytes()
            for row, start, count, _ in entries:
                num_bytes = 20 * max(0, min(start + count, len(PROMPTS[row]) - 1) - start)
                token_outputs[row] = token_outputs.get(row, b"") + data[:num_bytes]
                data = data[num_bytes:]
        texts.append(token_outputs)
    assert texts[0] == texts[1] == texts[2]


def test_an_output_used_as_a_prompt_has_the_same_logprobs(executor: Executor) -> None:
    """The records of sampled ids equal those of the same ids as a prompt: bit-identical, except with torch."""
    driver, dtype = executor.driver, logprob_dtype(4)
    driver.clear()
    options = options_of(num_logprobs=4, temperature=1.2, seed=3)
    ids = list(PROMPTS[2])
    result = driver.step([(0, 0, len(ids), True)], adds=[row_add(0, ids, driver.take_blocks(60), options)])
    token_outputs = [result.token_outputs.tobytes()]
    while len(ids) < 50:
        ids.append(int(result.ids[0]))
        result = driver.step([(0, len(ids) - 1, 1, True)])
        token_outputs.append(result.token_outputs.tobytes())
    adds = [row_add(1, ids, driver.take_blocks(60), options_of(num_prompt_logprobs=4))]
    again = driver.step([(1, 0, len(ids), True)], adds=adds).prompt_logprobs.tobytes()
    again = again[dtype.itemsize * (len(PROMPTS[2]) - 1) :]
    if isinstance(driver, Native):
        assert again == b"".join(token_outputs[:-1])
    else:
        first, second = (np.frombuffer(data, dtype) for data in (b"".join(token_outputs[:-1]), again))
        np.testing.assert_allclose(second["logprob"], first["logprob"], rtol=0, atol=executor.tolerance)


def test_only_the_first_sequence_reports_prompt_logprobs(executor: Executor) -> None:
    for _, result in executor.prompts([options_of(num_prompt_logprobs=3)], index=1):
        assert len(result.prompt_logprobs) == 0


@pytest.mark.parametrize("num_logprobs", [0, 1, 20, VOCAB_SIZE])
def test_output_logprobs_agree_with_transformers(executor: Executor, num_logprobs: int) -> None:
    """Records use the model's own distribution, whatever changes the sampling."""
    changes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9},
        {"repetition_penalty": 1.7, "frequency_penalty": 1.0},
        {"bias_ids": [7, 9], "bias_values": [30.0, 31.0], "bad_words_ids": [[9]]},
        {"allowed_ids": np.arange(50, 60, dtype=np.int32).tobytes(), "temperature": 1.0, "seed": 8},
    ]
    options = [options_of(num_logprobs=num_logprobs, **change) for change in changes]
    driver, dtype = executor.driver, logprob_dtype(num_logprobs)
    known = [list(ids) for ids in PROMPTS]
    for entries, result in executor.prompts(options):
        sampled_token_outputs = iter(np.frombuffer(result.token_outputs.tobytes(), dtype))
        for row, token in zip(result.rows.tolist(), result.ids.tolist(), strict=True):
            assert_token_output(executor, next(sampled_token_outputs), executor.logprobs(known[row])[-1], token)
            known[row].append(token)
        assert list(sampled_token_outputs) == [] and len(entries) >= len(result.rows)
    for _ in range(5):
        needed = [(row, len(ids) // 16 + 1 - int(driver.runner.rows.num_blocks[row])) for row, ids in enumerate(known)]
        blocks = [(row, block) for row, num in needed if num > 0 for block in driver.take_blocks(16 * num)]
        result = driver.step([(row, len(ids) - 1, 1, True) for row, ids in enumerate(known)], blocks=blocks)
        token_outputs = np.frombuffer(result.token_outputs.tobytes(), dtype)
        for row, (ids, token) in enumerate(zip(known, result.ids.tolist(), strict=True)):
            assert_token_output(executor, token_outputs[row], executor.logprobs(ids)[-1], token)
            ids.append(token)
    assert set(known[3][len(PROMPTS[3]) :]) == {7}, "the bias decides, and bad words stay excluded"
    assert all(50 <= token < 60 for token in known[4][len(PROMPTS[4]) :])


@pytest.mark.parametrize("chunk", [128, 16, 7])
def test_embeddings_agree_with_transformers(executor: Executor, chunk: int) -> None:
    """In a batch with rows that sample, and in steps without samples."""
    mean, last = options_of(pooling=m.Pooling.MEAN), options_of(pooling=m.Pooling.LAST)
    drawing = options_of(num_logprobs=1)
    for options in ([mean, last], [mean, drawing, last, drawing, mean], [last, drawing]):
        token_outputs: dict[int, bytes] = {}
        for entries, result in executor.prompts(options, chunk):
            data = result.token_outputs.tobytes()
            sampled = [row for row, _, _, samples in entries if samples]
            assert result.rows.tolist() == sampled
            assert result.finishes.tolist() == [m.Finish.NONE] * len(sampled) and (result.ids >= 0).all()
            for row in sampled:
                num_bytes = 12 if options[row % len(options)] is drawing else 4 * HIDDEN
                token_outputs[row], data = data[:num_bytes], data[num_bytes:]
            assert not data
        for row, ids in enumerate(PROMPTS):
            one, states = options[row % len(options)], executor.states(ids)
            if one is drawing:
                record = np.frombuffer(token_outputs[row], logprob_dtype(1))[0]
                np.testing.assert_allclose(
                    record["top_logprobs"][0], executor.logprobs(ids)[-1].max(), atol=executor.tolerance
                )
                continue
            expected = states.mean(0) if one is mean else states[-1]
            found = np.frombuffer(token_outputs[row], np.float32)
            np.testing.assert_allclose(found, expected, rtol=0, atol=executor.tolerance)


def test_a_restarted_prompt_is_pooled_from_the_start(executor: Executor) -> None:
    driver, ids = executor.driver, PROMPTS[3]
    driver.clear()
    for half_way in (False, True):
        mean = options_of(pooling=m.Pooling.MEAN)
        if half_way:
            driver.step([(1, 0, 25, False)], adds=[row_add(1, PROMPTS[4], driver.take_blocks(80), mean)])
            driver.step(drops=[1])
        result = driver.step([(1, 0, 40, True)], adds=[row_add(1, ids, driver.take_blocks(41), mean)])
        found = result.token_outputs.view(np.float32)
        np.testing.assert_allclose(found, executor.states(ids).mean(0), rtol=0, atol=executor.tolerance)
        driver.step(drops=[1])


def test_facts_contain_the_embedding_size(executor: Executor) -> None:
    assert executor.driver.runner.facts.hidden_size == HIDDEN


def test_a_failed_row_ends_with_its_error_at_the_next_id(executor: Executor) -> None:
    """As when a grammar fails. The other rows have their records."""
    driver = executor.driver
    executor.prompts([options_of(num_logprobs=0)])
    driver.runner.failed[2] = "it went wrong"
    driver.runner.failed[3] = "of a row that was dropped before it was reported"
    driver.step(drops=[3])
    for row in (1, 2, 4):
        driver.step(blocks=[(row, block) for block in driver.take_blocks(16)])
    result = driver.step([(row, len(PROMPTS[row]), 1, True) for row in (1, 2, 4)])
    assert result.finishes.tolist() == [m.Finish.NONE, m.Finish.ERROR, m.Finish.NONE]
    assert result.errors == ("it went wrong",) and not driver.runner.failed
    assert result.ids[1] == -1 and len(result.token_outputs) == 8 and (result.token_outputs.view(np.float32) < 0).all()
    after = driver.step([(row, len(PROMPTS[row]) + 1, 1, True) for row in (1, 2, 4)])
    assert after.ids[1] == -1 and (after.ids[[0, 2]] >= 0).all()
    assert after.finishes.tolist() == [m.Finish.NONE] * 3 and not after.errors
