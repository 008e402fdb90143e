"""Rows with a grammar: every finished output matches it."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from pipeline.runtime.messages import GRAMMAR_FAILED, NOTHING_LEFT, Finish
from pipeline.runtime.process import suspension
from pipeline.runtime.workers.worker import Worker
from pipeline.stages.execute.grammar_masks import masks as masks_module
from tests.stages.execute.hanging_masks import HANGS
from tests.stages.execute.structured import EOS, Seq, Structured, ids_of, largest_id, lark, options, write

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": -9, "maximum": 99}, "b": {"enum": ["x", "yé", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = json.dumps(
    {"grammars": [{"json_schema": SCHEMA | {"x-guidance": {"whitespace_flexible": False}}}]}, ensure_ascii=False
)

ENDLESS = "start: A\nA: " + " & ".join(f"/(.*[{chr(97 + i)}].{{{i}}})*/" for i in range(1, 20))
"""The library needs minutes to compile it."""

DEEP = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(40_000)) + '\nr40000: "x"\n'
"""Overflows the stack."""

BACK_ENDS: dict[str, Any] = {"torch": {"kernels": "torch"}, "native": {"dtype": "bfloat16"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("structured"))


@pytest.fixture(scope="module", params=BACK_ENDS)
def back_end(folder: Path, request: pytest.FixtureRequest) -> Iterator[Structured]:
    with Structured(folder, **BACK_ENDS[request.param]) as structured:
        yield structured


@pytest.fixture(scope="module")
def torch_end(folder: Path) -> Iterator[Structured]:
    with Structured(folder, kernels="torch") as structured:
        yield structured


def test_finished_outputs_match(back_end: Structured) -> None:
    patterns = ["[ab]{3}c*", "(yes|no)", "[0-9]{1,4}(\\.[0-9]{2})?", "é+x"]
    seqs = [Seq(options(lark(pattern), seed=i)) for i, pattern in enumerate(patterns)]
    schemas = [Seq(options(JSON, seed=i)) for i in range(3)]
    back_end.run(*seqs, *schemas)
    for seq, pattern in zip(seqs, patterns, strict=True):
        assert seq.finish is Finish.STOP and seq.output[-1] == EOS, seq
        assert re.fullmatch(pattern, seq.text), (pattern, seq.text)
    for seq in schemas:
        assert seq.finish is Finish.STOP
        Draft202012Validator(SCHEMA).validate(json.loads(seq.text))


def test_greedy_rows_are_masked_too(back_end: Structured) -> None:
    seq = Seq(options(lark("[xyz]{5}"), temperature=0.0))
    back_end.run(seq)
    assert re.fullmatch("[xyz]{5}", seq.text) and seq.finish is Finish.STOP


def test_ids_without_a_token_are_never_sampled(back_end: Structured) -> None:
    seqs = [Seq(options(lark("(.|\\n)*"), temperature=3.0, seed=i)) for i in range(4)]
    back_end.run(*seqs, max_tokens=40)
    assert max(map(largest_id, seqs)) <= EOS


@pytest.mark.parametrize("text", ["</s>x", "ab</s>", "<s></s>"])
def test_text_that_spells_a_special_token_is_written_as_text(torch_end: Structured, text: str) -> None:
    """The library computes forced ids from text, and could take these for special tokens."""
    enum = json.dumps({"grammars": [{"json_schema": {"enum": [text]}}]})
    for grammar, whole in ((lark(text.replace("/", "\\/")), text), (enum, json.dumps(text))):
        seq = Seq(options(grammar))
        torch_end.run(seq)
        assert (seq.finish, seq.text) == (Finish.STOP, whole), seq
        assert not {EOS - 1, EOS} & set(seq.output[:-1])


@pytest.mark.parametrize("token", ["</s>", "<[257]>", "<s>"])
def test_a_special_token_that_the_grammar_requires_is_sampled(torch_end: Structured, token: str) -> None:
    seq = Seq(options(f'start: "ab" {token}'))
    torch_end.run(seq)
    assert seq.finish is Finish.STOP and seq.output == [*ids_of("ab"), *([256] if token == "<s>" else []), EOS]


def test_rows_without_a_grammar_are_not_masked(back_end: Structured) -> None:
    alone, beside = Seq(options(seed=9)), Seq(options(seed=9))
    greedy_alone, greedy_beside = Seq(options(temperature=0.0)), Seq(options(temperature=0.0))
    back_end.run(alone, greedy_alone, max_tokens=20)
    back_end.run(beside, Seq(options(JSON)), greedy_beside, Seq(options(lark("a*"))), max_tokens=20)
    assert beside.output == alone.output and greedy_beside.output == greedy_alone.output


def test_a_preempted_row_continues_where_it_was(back_end: Structured) -> None:
    whole, broken = Seq(options(JSON, seed=3)), Seq(options(JSON, seed=3))
    back_end.run(whole)
    back_end.add(broken, Seq(options(lark("b{30}"))))
    for _ in range(4):
        back_end.step()
    back_end.drop(broken)
    back_end.step()
    back_end.add(broken)
    back_end.finish()
    assert broken.output == whole.output and broken.finish is Finish.STOP


def test_each_fork_has_its_own_matcher(back_end: Structured) -> None:
    first = Seq(options(lark("[a-z]{12}"), seed=1))
    back_end.add(first)
    back_end.step()
    back_end.step()
    forks = [Seq(options(lark("[a-z]{12}"), seed=1), index=i) for i in (1, 2)]
    for fork in forks:
        back_end.add(fork, fork_of=first)
    back_end.finish()
    texts = {seq.text for seq in (first, *forks)}
    assert len(texts) == 3
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts)


def test_a_resumed_output_continues(torch_end: Structured) -> None:
    seq = Seq(options(lark("abc[0-9]{3}")), output=ids_of("abc1"))
    torch_end.run(seq)
    assert re.fullmatch("abc1[0-9]{2}", seq.text) and seq.finish is Finish.STOP


def test_an_output_that_does_not_match_is_an_error(torch_end: Structured) -> None:
    seq, other = Seq(options(lark("abc[0-9]{3}")), output=ids_of("abx")), Seq(options(lark("yes")))
    torch_end.run(seq, other)
    assert seq.finish is Finish.ERROR and "does not match the grammar" in seq.error
    assert other.text == "yes"


def test_stop_ids_are_allowed_only_where_the_grammar_may_end(torch_end: Structured) -> None:
    (stop,) = ids_of("!")
    seqs = [Seq(options(lark("[!a]{4}b*"), stop_token_ids=[stop], seed=i, temperature=2.0)) for i in range(6)]
    torch_end.run(*seqs)
    assert all(seq.finish is Finish.STOP for seq in seqs)
    for seq in seqs:
        assert seq.output[-1] in (stop, EOS)
        assert re.fullmatch("a{4}b*", seq.text.removesuffix("!"))
    assert {seq.output[-1] for seq in seqs} == {stop, EOS}


def test_a_stop_id_is_sampled_if_it_is_the_only_allowed_id(torch_end: Structured) -> None:
    (stop,) = ids_of("!")
    seq = Seq(options(lark("ab!c"), stop_token_ids=[stop]))
    torch_end.run(seq)
    assert (seq.text, seq.finish) == ("ab!", Finish.STOP)


def test_ignore_eos_continues_while_the_grammar_allows_more(torch_end: Structured) -> None:
    endless, short = Seq(options(lark("a*"), ignore_eos=True)), Seq(options(lark("a{0,7}"), ignore_eos=True))
    torch_end.run(endless, short, max_tokens=30)
    assert (endless.text, endless.finish) == ("a" * 30, Finish.LENGTH)
    assert (short.text, short.finish) == ("a" * 7, Finish.STOP)


def test_nothing_is_sampled_if_the_request_forbids_all_ids_that_the_grammar_allows(torch_end: Structured) -> None:
    seqs = [
        Seq(options(lark("a"), bad_words_ids=[ids_of("a")])),
        Seq(options(lark("a+b"), allowed_ids=np.array(ids_of("c"), np.int32).tobytes())),
        Seq(options(lark("[ab]{9}"), min_tokens=3)),
    ]
    torch_end.run(*seqs)
    assert [seq.finish for seq in seqs] == [Finish.ERROR, Finish.ERROR, Finish.STOP]
    assert all(seq.error.startswith(NOTHING_LEFT) for seq in seqs[:2])
    assert "'bad_words'" in seqs[0].error and "'allowed_token_ids'" in seqs[1].error


def test_an_output_that_can_only_end_ends_before_min_tokens(back_end: Structured) -> None:
    """And not earlier, with the record of the id that ends it."""
    (stop,) = ids_of("!")
    seqs = [
        Seq(options(lark("abc"), min_tokens=9)),
        Seq(options(lark("a{2,5}"), min_tokens=9, temperature=1.0)),
        Seq(options(lark("[ab]{9}a*"), min_tokens=12, seed=5)),
        Seq(options(lark("ab!"), min_tokens=9, stop_token_ids=[stop, EOS])),
        Seq(options(lark("abc"), min_tokens=9, allowed_ids=np.array(ids_of("abc"), np.int32).tobytes())),
    ]
    back_end.run(*seqs)
    assert [seq.finish for seq in seqs[:4]] == [Finish.STOP] * 4
    assert (seqs[0].output[-1], seqs[1].output[-1]) == (EOS, EOS)
    assert len(seqs[0].output) == 4 and len(seqs[1].output) == 6 and len(seqs[2].output) >= 13
    assert seqs[3].text == "ab!"
    assert seqs[4].finish is Finish.ERROR and "'allowed_token_ids'" in seqs[4].error


def test_a_model_with_fewer_ids_than_its_tokenizer(tmp_path: Path) -> None:
    with Structured(write(tmp_path, vocab_size=257, eos_ids=[256]), kernels="torch") as structured:
        seq = Seq(options(lark("[ab]{6}")))
        structured.run(seq)
    assert seq.output[-1] == 256 and re.fullmatch("[ab]{6}<s>", seq.text)


def test_a_dead_mask_process_is_replaced_without_data_loss(back_end: Structured) -> None:
    seqs = [Seq(options(lark("[a-z]{20}"), seed=i)) for i in range(3)]
    again = [Seq(options(lark("[a-z]{20}"), seed=i)) for i in range(3)]
    back_end.run(*seqs)
    back_end.add(*again)
    for i in range(20):
        if i in (4, 5, 11):
            kill(back_end)
        back_end.step()
    back_end.finish()
    assert [seq.output for seq in again] == [seq.output for seq in seqs]


def kill(structured: Structured) -> None:
    worker = structured.runner.masks._worker
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker._process.wait()


def test_a_grammar_that_never_terminates_ends_only_its_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Structured(folder, dtype="bfloat16") as structured:
        monkeypatch.setattr(structured.runner.masks, "_limit_s", 0.3)
        bad, good = Seq(options(ENDLESS)), Seq(options(lark("[ab]{9}")))
        structured.run(bad, good)
    assert bad.finish is Finish.ERROR and bad.error == f"{GRAMMAR_FAILED}: it took longer than 0.3 s"
    assert good.finish is Finish.STOP and re.fullmatch("[ab]{9}", good.text)


def test_a_grammar_that_hangs_in_the_middle_of_its_output_ends_only_its_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs where the masks of all rows are computed together, and again where the next process computes them row
    by row."""
    assert ids_of("z") == [HANGS]
    texts = "[ab]{9}", "[a-c]{12}"
    with Structured(folder, dtype="bfloat16") as structured:
        expected = [Seq(options(lark(text), seed=seed)) for seed, text in enumerate(texts)]
        structured.run(*expected)
    worker_of, names = Worker, list[str]()

    def hanging(module: str, name: str, *args: Any) -> Any:
        names.append(name)
        return worker_of("tests.stages.execute.hanging_masks", name, *args)

    monkeypatch.setattr(masks_module, "Worker", hanging)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    with Structured(folder, dtype="bfloat16") as structured:
        monkeypatch.setattr(structured.runner.masks, "_limit_s", 0.5)
        bad = Seq(options(lark("abz[a-z]{9}")))
        good = [Seq(options(lark(text), seed=seed)) for seed, text in enumerate(texts)]
        structured.run(bad, *good)
    assert bad.finish is Finish.ERROR and bad.error == f"{GRAMMAR_FAILED}: it took longer than 0.5 s"
    assert bad.text == "abz"
    assert [seq.output for seq in good] == [seq.output for seq in expected]
    assert len(names) == 3, "the first process hangs with all rows, the second with one, and the third with none"


class PausedClock:
    """A clock that jumps at each of the first sleeps, as if all processes were suspended then. Afterwards it calls
    `go_on`."""

    def __init__(self, num_pauses: int, go_on: Callable[[], None]) -> None:
        self._num_left, self._go_on, self._paused_s = num_pauses, go_on, 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._paused_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        if self._num_left:
            self._paused_s += 1000.0
            self._num_left -= 1
            if not self._num_left:
                self._go_on()


def test_time_in_which_all_processes_were_suspended_does_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Structured(folder, dtype="bfloat16") as structured:
        seq = Seq(options(lark("[ab]{9}")))
        structured.add(seq)
        structured.step()
        worker = structured.runner.masks._worker
        assert worker is not None
        clock = PausedClock(3, lambda: os.kill(worker.pid, signal.SIGCONT))
        for module in (masks_module, suspension):
            monkeypatch.setattr(module, "time", clock)
        os.kill(worker.pid, signal.SIGSTOP)
        structured.finish()
        assert not clock._num_left, "the step waited for its mask"
    assert seq.finish is Finish.STOP and re.fullmatch("[ab]{9}", seq.text)


def test_a_grammar_that_crashes_the_library_ends_only_its_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Structured(folder, kernels="torch") as structured:
        # On a slow machine, the stack takes about a second to overflow.
        monkeypatch.setattr(structured.runner.masks, "_limit_s", 10.0)
        good, bad = Seq(options(lark("[ab]{9}"))), Seq(options(DEEP))
        structured.add(good)
        structured.step()
        structured.run(bad)
    assert bad.finish is Finish.ERROR and bad.error == f"{GRAMMAR_FAILED}: it crashed the library"
    assert good.finish is Finish.STOP and re.fullmatch("[ab]{9}", good.text)


def test_a_model_without_grammar_support_is_a_clear_error(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with Structured(tmp_path, kernels="torch") as structured:
        bad, good = Seq(options(lark("a"))), Seq(options())
        structured.run(bad, good, max_tokens=4)
    assert bad.finish is Finish.ERROR and "tokenizer" in bad.error
    assert good.finish in (Finish.LENGTH, Finish.STOP)


def test_the_mask_process_leaves_nothing_behind(folder: Path) -> None:
    with Structured(folder, kernels="torch") as structured:
        structured.run(Seq(options(lark("a"))))
        worker = structured.runner.masks._worker
        assert worker is not None and worker.is_alive
    assert not worker.is_alive
    assert masks_module.LATE_MS < 1000


def test_slow_masks_are_reported(torch_end: Structured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler has their rows run in turns, with those that begin and those that go on."""
    deep = 'start: "x" r0\n' + "".join(f'r{i}: r{i + 1} | "a" r{i + 1}\n' for i in range(90)) + "r90: /a{60}/"
    slow, quick, free = Seq(options(deep)), Seq(options(lark("[xyz]{30}"))), Seq(options())
    masks = torch_end.runner.masks
    assert masks.take_slow() is None
    torch_end.add(slow, quick, free)
    for _ in range(6):
        torch_end.step()
    assert masks.take_slow() == {}, "with few bytes in the vocabulary none is slow"
    monkeypatch.setattr(masks_module, "SLOW_STEP_S", 0.0)
    monkeypatch.setattr(masks_module, "SLOW_ROW_S", 0.0)
    torch_end.step()
    reported = masks.take_slow()
    assert (
        reported is not None
        and reported.keys() == {slow.row, quick.row}
        and reported[slow.row] > reported[quick.row] > 0
    )
    assert masks.take_slow() == {}
    torch_end.finish(30)
    assert masks.take_slow() is None
