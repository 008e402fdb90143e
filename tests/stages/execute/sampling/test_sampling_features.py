"""Each sampling option has its effect in both back ends, and requests without them have no overhead."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.kernels.sampling.logits_processor_inputs import BEGIN, LogitsProcessors, bits_of
from pipeline.kernels.sampling.logits_processors import allows_any
from pipeline.kernels.sampling.sampling_inputs import SamplingInputs
from pipeline.runtime import messages as m
from pipeline.stages.execute import rows
from pipeline.stages.execute.cpu.program import MasksLate
from pipeline.stages.execute.rows import RowTable
from pipeline.stages.execute.sampling_features import logits_processors_of, no_token_error
from tests.stages.execute import checkpoints
from tests.stages.execute.checkpoints import EOS_ID, VOCAB_SIZE
from tests.stages.execute.driver import Driver, GivenMasks, row_add, settings
from tests.stages.execute.native_driver import ISAS, Native, random_ids, write

PROMPT = random_ids(11, 4)
EVERYTHING = {
    "bias_ids": [5, 9],
    "bias_values": [2.0, -1.0],
    "repetition_penalty": 1.2,
    "bad_words_ids": [[7]],
    "min_tokens": 3,
    "allowed_ids": np.arange(0, VOCAB_SIZE, 2, dtype=np.int32).tobytes(),
}


@pytest.fixture(scope="module", params=["torch", ISAS[0]])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write(folder, checkpoints.config_of())
    if request.param == "torch":
        made = Driver(folder, settings(dtype="bfloat16", kernels="torch"))
    else:
        made = Native(folder, request.param, keep_logits=False, max_num_seqs=8)
    yield made
    made.runner.close()


def options_of(**fields: Any) -> m.GenerationOptions:
    return m.GenerationOptions(**{"temperature": 0.0, "ignore_eos": True, **fields})


def generate(driver: Driver, options: list[m.GenerationOptions], num: int) -> list[list[int]]:
    """Up to `num` ids after PROMPT for each, in one batch; -1 after a row has ended."""
    driver.clear()
    adds = [row_add(row, PROMPT, driver.take_blocks(64), one) for row, one in enumerate(options)]
    texts: list[list[int]] = [[] for _ in options]
    for step in range(num):
        start = len(PROMPT) + step - 1
        entries = [(row, start, 1, True) if step else (row, 0, len(PROMPT), True) for row in range(len(options))]
        result = driver.step(entries, adds=() if step else adds)
        for text, token in zip(texts, result.ids.tolist(), strict=True):
            text.append(token)
    return texts


def biased(ids: list[int], value: float = 100.0, **others: Any) -> m.GenerationOptions:
    """Greedy, with all other ids excluded."""
    return options_of(bias_ids=ids, bias_values=[value] * len(ids), **others)


def test_no_output_ends_before_min_tokens(driver: Driver) -> None:
    """Neither by an end-of-sequence id nor by a stop id, also with ignore_eos."""
    stop = 17
    texts = generate(
        driver,
        [
            biased([EOS_ID], ignore_eos=False, min_tokens=4),
            biased([EOS_ID], ignore_eos=True, min_tokens=4),
            biased([stop], stop_token_ids=[stop], min_tokens=2),
            biased([stop], stop_token_ids=[stop]),
        ],
        7,
    )
    ended, ignored, stopped, at_once = texts
    assert EOS_ID not in ended[:4] and ended[4:] == [EOS_ID, -1, -1]
    assert EOS_ID not in ignored[:4] and ignored[4:] == [EOS_ID] * 3
    assert stop not in stopped[:2] and stopped[2:] == [stop] + [-1] * 4
    assert at_once == [stop] + [-1] * 6


def test_bad_words_are_never_complete(driver: Driver) -> None:
    (plain, *_) = generate(driver, [options_of()], 12)
    assert len(set(plain)) > 3
    word = plain[2:5]
    runs = word, [plain[3]], [PROMPT[-1], plain[0]]
    texts = generate(driver, [options_of(bad_words_ids=[run]) for run in runs], 12)
    assert texts[0][:4] == plain[:4] and texts[0][4] != plain[4]
    assert word not in [texts[0][i : i + 3] for i in range(10)]
    assert texts[1][:3] == plain[:3] and plain[3] not in texts[1]
    assert texts[2] == plain, "the prompt does not count"


def test_ids_that_the_begin_excludes_are_only_not_the_first(driver: Driver) -> None:
    assert m.BEGIN == BEGIN
    (plain, *_) = generate(driver, [options_of()], 12)
    (text,) = generate(driver, [options_of(bad_words_ids=[[m.BEGIN, plain[0]]])], 12)
    assert text[0] != plain[0]
    every = [[m.BEGIN, token] for token in range(VOCAB_SIZE) if token != 9]
    (text, sampled) = generate(
        driver, [options_of(bad_words_ids=every), options_of(bad_words_ids=every, temperature=2.0, seed=1)], 12
    )
    assert text[0] == sampled[0] == 9 and set(sampled[1:]) != {9}
    (text,) = generate(driver, [biased([9, 12], bad_words_ids=[[m.BEGIN, 9]])], 9)
    assert text[0] == 12 and 9 in text, "a begin is no place between others"


def test_penalties_count_earlier_ids(driver: Driver) -> None:
    """A bias favours three ids: after each one its neighbour is better. The repetition penalty counts the prompt
    too."""
    ids = [20, 21, 22]
    assert all(token not in PROMPT for token in ids)
    steps = {20: 100.0, 21: 99.0, 22: 98.0}
    bias = {"bias_ids": list(steps), "bias_values": list(steps.values())}
    (text,) = generate(driver, [options_of(**bias, presence_penalty=60.0)], 6)
    assert sorted(text[:3]) == ids and text[3] == text[0] == text[5], "presence counts once"
    (text,) = generate(driver, [options_of(**bias, frequency_penalty=60.0)], 6)
    assert sorted(text[:3]) == ids and sorted(text[3:]) == ids, "frequency counts each time"
    seen = PROMPT[3]
    (text,) = generate(driver, [options_of(bias_ids=[seen, 30], bias_values=[150.0, 120.0], repetition_penalty=2.0)], 1)
    assert text == [30]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_ids_are_sampled(driver: Driver, temperature: float) -> None:
    allowed = np.array([3, 77, 78, 299], np.int32)
    options = options_of(temperature=temperature, seed=3, allowed_ids=allowed.tobytes())
    (text,) = generate(driver, [options], 20)
    assert set(text) <= set(allowed.tolist()) and (len(set(text)) > 1 or not temperature)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_ids": np.array([VOCAB_SIZE, 2**31 - 1, -1], np.int32).tobytes()},
        {"allowed_ids": np.array([7], np.int32).tobytes(), "bad_words_ids": [[7]]},
        {"allowed_ids": np.array([EOS_ID], np.int32).tobytes(), "min_tokens": 1},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_possible_id_ends_with_an_error(
    driver: Driver, fields: dict[str, Any], temperature: float
) -> None:
    driver.clear()
    adds = [
        row_add(0, PROMPT, driver.take_blocks(32), options_of(temperature=temperature, num_logprobs=0, **fields)),
        row_add(1, PROMPT, driver.take_blocks(32), options_of(num_logprobs=0)),
    ]
    result = driver.step([(0, 0, 11, True), (1, 0, 11, True)], adds=adds)
    assert result.finishes.tolist() == [m.Finish.ERROR, m.Finish.NONE]
    assert result.ids[0] == -1 and result.ids[1] >= 0 and len(result.token_outputs) == 4
    assert len(result.errors) == 1 and "No token can be sampled" in result.errors[0]
    assert driver.step([(0, 11, 1, True), (1, 11, 1, True)]).ids[0] == -1


def test_ids_beyond_the_vocabulary_are_ignored(driver: Driver) -> None:
    far = [VOCAB_SIZE, VOCAB_SIZE + 31, 2**31 - 1, -1]
    options = options_of(
        bias_ids=far, bias_values=[100.0] * 4, bad_words_ids=[far, [far[0]]], stop_token_ids=far, min_tokens=3
    )
    assert generate(driver, [options], 6) == generate(driver, [options_of()], 6)


def test_sampling_options_do_not_affect_other_rows(driver: Driver) -> None:
    sampled = options_of(temperature=1.0, seed=9)
    alone = generate(driver, [options_of()], 8) + generate(driver, [sampled], 8)
    wild = options_of(temperature=0.8, seed=1, num_logprobs=5, **EVERYTHING)
    together = generate(driver, [wild, options_of(), wild, sampled, options_of(num_prompt_logprobs=2)], 8)
    assert [together[1], together[3], together[4]] == [alone[0], alone[1], alone[0]]


def test_a_grammar_masks_allowed_ids(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As stages/execute/grammar_masks/masks.py writes masks: for the requested places, before the wait ends."""
    runner, sampling_inputs, given = driver.runner, driver.runner.sampling_inputs, GivenMasks(driver.runner)
    driver.clear()
    monkeypatch.setattr(runner, "masks", given)
    monkeypatch.setattr(runner._changes, "_masks", given)
    both = options_of(compiled_grammar="any", allowed_ids=np.arange(100, 200, dtype=np.int32).tobytes())
    options = [options_of(), both, options_of(compiled_grammar="any", temperature=1.0, seed=2)]
    adds = [row_add(row, PROMPT, driver.take_blocks(32), one) for row, one in enumerate(options)]
    masks = [bits_of(np.array(ids, np.int32), VOCAB_SIZE) for ids in ([50, 150, 250], [60])]
    masked_indices: list[list[int]] = []

    def write() -> None:
        deadline = time.monotonic() + 10
        while len(sampling_inputs.masked) != 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        masked_indices.append(sampling_inputs.masked.tolist())
        sampling_inputs.mask_words[sampling_inputs.masked] = masks
        given.word[0] = given.ticket

    writer = threading.Thread(target=write)
    writer.start()
    try:
        result = driver.step([(0, 0, 11, True), (1, 0, 11, True), (2, 0, 11, True)], adds=adds)
    finally:
        writer.join(10)
    assert masked_indices == [[1, 2]] and result.ids.tolist()[1:] == [150, 60]
    # Places belong to a step: in the next one, other rows may have them. One of them fails.
    sampling_inputs.mask_words[:] = bits_of(np.array([170], np.int32), VOCAB_SIZE)
    given.failed[2] = "it went wrong"
    result = driver.step([(2, 11, 1, True), (0, 11, 1, True), (1, 11, 1, True)])
    assert sampling_inputs.masked.tolist() == [0, 2]
    assert result.ids[0] == 170 and result.ids[1] not in (170, -1) and result.ids[2] == -1
    assert result.errors == ("it went wrong",)
    driver.clear()


def test_missing_masks_are_an_error_and_the_step_can_be_repeated(driver: Driver) -> None:
    driver.clear()
    program, word = driver.runner.program, np.zeros(1, np.uint32)
    program.wait_for(word.ctypes.data, 7, 20)
    with pytest.raises(MasksLate):
        generate(driver, [options_of()], 1)
    word[0] = 7
    first = program.run().tolist()
    program.wait_for(0, 0, 0)
    assert [first] == generate(driver, [options_of()], 1)


# ------------------------------------------------------------------------------------- requests without options


def test_options_without_effect_need_no_logits_processors() -> None:
    ids = np.zeros(9, np.int32)
    nothing = m.GenerationOptions(temperature=0.7, top_k=5, top_p=0.5, min_p=0.1, stop_token_ids=[4], num_logprobs=0)
    assert logits_processors_of(nothing, ids, 3, [EOS_ID], VOCAB_SIZE) is None
    unheard = m.GenerationOptions(bias_ids=[VOCAB_SIZE], bias_values=[3.0], bad_words_ids=[[], [-4]])
    assert logits_processors_of(unheard, ids, 3, [EOS_ID], VOCAB_SIZE) is None
    huge = m.GenerationOptions(bias_ids=[1], bias_values=[1e300], repetition_penalty=1e300, min_tokens=2**62)
    logits_processors = logits_processors_of(huge, ids, 3, [EOS_ID], VOCAB_SIZE)
    assert (
        logits_processors is not None
        and np.isfinite(logits_processors.bias_values).all()
        and logits_processors.min_tokens == 2**31 - 1
    )


def add_row(table: RowTable, row: int, options: m.GenerationOptions) -> None:
    ids, blocks = np.arange(1, 9, dtype=np.int32), np.array([row], np.int32)
    table.add(row, 1, 0, ids, blocks, options, [EOS_ID], -1, 6)


def test_lists_of_ids_are_decoded_and_converted_once_for_the_sequences_of_a_request(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n = 128 sequences with 30,000 ids of bad words held up a step of all others for a second."""
    calls: list[m.GenerationOptions] = []

    def counted(options: m.GenerationOptions, *args: Any) -> LogitsProcessors | None:
        calls.append(options)
        return logits_processors_of(options, *args)

    monkeypatch.setattr(rows, "logits_processors_of", counted)
    alike, other = options_of(**EVERYTHING, n=3), options_of(**EVERYTHING, presence_penalty=1.0)
    prompts = [PROMPT, PROMPT[:-2], PROMPT]
    adds = [row_add(i, ids, [i], alike, index=i) for i, ids in enumerate(prompts)]
    driver.clear()
    driver.step([(i, 0, len(ids), True) for i, ids in enumerate(prompts)], adds=adds)
    driver.step([(3, 0, len(PROMPT), True)], adds=[row_add(3, PROMPT, [3], other)])
    assert calls == [alike, other]
    table = driver.runner.rows
    made = [one for one in table.logits_processors[:4] if one is not None]
    assert len(made) == 4
    assert made[0].runs is made[1].runs is made[2].runs is not made[3].runs
    assert [one.num_prompt for one in made] == [*map(len, prompts), len(PROMPT)]
    assert all(np.shares_memory(one.ids, table.ids[row]) for row, one in enumerate(made))
    driver.clear()


def test_a_step_of_greedy_rows_skips_all_features_again_after_others_have_ended() -> None:
    table, sampling_inputs = RowTable(8, 64, 8, VOCAB_SIZE), SamplingInputs(8, VOCAB_SIZE)
    rows = np.arange(3, dtype=np.int32)
    for row in range(3):
        add_row(table, row, options_of())
    for _ in range(2):
        for array in (sampling_inputs.temperature, sampling_inputs.top_p, sampling_inputs.num_known):
            array[:] = 99
        sampling_inputs.greedy[:] = 0
        table.fill_sampling_inputs(sampling_inputs, rows)
        assert sampling_inputs.greedy[:3].all()
        assert (
            (sampling_inputs.temperature == 99).all()
            and (sampling_inputs.top_p == 99).all()
            and (sampling_inputs.num_known == 99).all()
        )
        # A row with all features starts next to greedy ones, and ends.
        wild = options_of(temperature=1.0, num_logprobs=3, num_prompt_logprobs=2, compiled_grammar="any", **EVERYTHING)
        add_row(table, 5, wild)
        table.fill_sampling_inputs(sampling_inputs, np.array([0, 5, 1], np.int32))
        assert sampling_inputs.greedy[:3].tolist() == [1, 0, 1] and sampling_inputs.masked.tolist() == [1]
        assert (
            (sampling_inputs.logits_processors[:3] != 0).tolist()
            == (sampling_inputs.masks[:3] != 0).tolist()
            == [False, True, False]
        )
        assert (
            sampling_inputs.row_processors(1) is table.logits_processors[5] is not None
            and sampling_inputs.row_processors(0) is None
        )
        assert sampling_inputs.logprobs.widths.tolist() == [0, 28, 0] and len(sampling_inputs.logprobs.memory) == 28
        table.drop(np.array([5], np.int32))
        assert table.requested_features == 0 and table.logits_processors[5] is None
        table.fill_sampling_inputs(sampling_inputs, rows)
        assert len(sampling_inputs.logprobs.memory) == len(sampling_inputs.masked) == 0


def test_a_reused_row_has_no_options_of_its_predecessor(driver: Driver) -> None:
    plain = generate(driver, [options_of(), options_of()], 6)
    generate(
        driver, [options_of(num_logprobs=0, **EVERYTHING), options_of(pooling=m.Pooling.MEAN, num_prompt_logprobs=1)], 1
    )
    assert generate(driver, [options_of(), options_of()], 6) == plain


def processors_of(**fields: Any) -> LogitsProcessors | None:
    return logits_processors_of(options_of(**fields), np.array(PROMPT, np.int32), len(PROMPT), {EOS_ID}, VOCAB_SIZE)


ONLY_THE_END = {"allowed_ids": np.array([EOS_ID], np.int32).tobytes(), "min_tokens": 3}


@pytest.mark.parametrize(
    ("fields", "has_grammar", "is_nan", "names"),
    [
        ({}, False, False, None),
        ({}, True, False, None),  # a grammar that allows nothing has failed before
        ({"repetition_penalty": 1.2}, True, False, None),
        (ONLY_THE_END, False, False, "'allowed_token_ids' and 'min_tokens' exclude"),
        (ONLY_THE_END, False, True, None),
        ({"min_tokens": 3}, True, False, "the structured output format and 'min_tokens' exclude"),
        ({"bad_words_ids": [[1]]}, False, False, "'bad_words' or the model's generation_config.json excludes"),
        ({"min_tokens": 3}, True, True, None),
    ],
)
def test_the_error_without_an_id_names_what_excludes_all(
    fields: dict[str, Any], has_grammar: bool, is_nan: bool, names: str | None
) -> None:
    error = no_token_error(processors_of(**fields), 0, has_grammar, is_nan)
    assert error == m.NAN_LOGITS if names is None else names in error and error.startswith(m.NOTHING_LEFT)


@pytest.mark.parametrize(("fields", "leaves"), [(ONLY_THE_END, False), ({"min_tokens": 3}, True), (EVERYTHING, True)])
def test_whether_logits_processors_leave_an_id(fields: dict[str, Any], leaves: bool) -> None:
    processors = processors_of(**fields)
    assert processors is not None and allows_any(processors, len(PROMPT), VOCAB_SIZE) == leaves
