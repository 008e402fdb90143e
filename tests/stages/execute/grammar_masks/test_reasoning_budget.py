"""Reasoning budgets: what is forced, and when; alone, in batches, preempted, with proposed ids, with a grammar."""

import re
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.grammars.engine import Engine
from pipeline.runtime import messages as m
from pipeline.stages.execute.grammar_masks.reasoning_budget import BudgetState, Pieces, is_complete
from tests.stages.execute.grammar_masks.test_masks_scheduled import BLOCK_BYTES, Wrong
from tests.stages.execute.pair import GREEDY, Pair, Request, make_runner
from tests.stages.execute.structured import EOS, Seq, Structured, ids_of, lark, options, text_of, write

CLOSING = " Enough.</t>"


def budget(num_tokens: int, *, is_open: bool = True, anywhere: bool = False, closing: str = CLOSING) -> Any:
    return m.ReasoningBudget(
        num_tokens,
        [b"<t>"],
        [b"</t>", b"<call>"],
        np.array(ids_of(closing), "<i4").tobytes(),
        is_open,
        anywhere,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("budget"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder)


def written(engine: Engine, limit: Any, text: str) -> str:
    """What comes of a model that wants to write `text`."""
    state, out, wanted = BudgetState(limit, Pieces(engine.tokenizer)), list[int](), ids_of(text)
    while wanted or state.forced:
        out.append(state.forced[0] if state.forced else wanted.pop(0))
        state.push_all([out[-1]])
    return text_of(out)


@pytest.mark.parametrize(
    ("limit", "text", "found"),
    [
        (budget(5), "Hmmmmmmmm", f"Hmmmm{CLOSING}mmmm"),
        (budget(0), "Hm", f"{CLOSING}Hm"),
        (budget(9), "Hm.</t>Yes and no", "Hm.</t>Yes and no"),
        (budget(9), "Hm.<call>f() and so on", "Hm.<call>f() and so on"),
        (budget(7), "Hm.</t>Yes and no", "Hm.</t>Yes and no"),  # the end mark counts, too
        (budget(6), "Hm.</t>Yes", f"Hm.</t{CLOSING}>Yes"),
        (budget(2, is_open=False), "Yes and no", "Yes and no"),
        (budget(2, is_open=False), "Yes <t>Hmmmm", "Yes <t>Hmmmm"),
        (budget(2, is_open=False), "\n <t>Hmmmm", f"\n <t>Hm{CLOSING}mmm"),
        (budget(0, is_open=False), "<t>Hmmmm", f"<t>{CLOSING}Hmmmm"),
        (budget(2, is_open=False), "<th>Hmmmm", "<th>Hmmmm"),
        (budget(2), "Hmm<t>mm</t>", f"Hm{CLOSING}m<t>mm</t>"),
        (budget(3, is_open=False, anywhere=True), "a<t>H</t>b", f"a<t>H</{CLOSING}t>b"),
        (budget(6, is_open=False, anywhere=True), "a<t>H</t>b<t>Hm<t>m", f"a<t>H</t>b<t>H{CLOSING}m<t>{CLOSING}m"),
    ],
)
def test_what_is_written(engine: Engine, limit: Any, text: str, found: str) -> None:
    assert written(engine, limit, text) == found
    # Ids that come together, as those of a row that begins again, lead to the same.
    ids = ids_of(found)
    for cut in range(len(ids)):
        one, all_at_once = (BudgetState(limit, Pieces(engine.tokenizer)) for _ in range(2))
        for token in ids[:cut]:
            one.push_all([token])
        all_at_once.push_all(ids[:cut])
        assert one.forced == all_at_once.forced and one.is_over == all_at_once.is_over
        one.push_all(ids[cut:])
        all_at_once.push_all(ids[cut:])
        assert one.forced == all_at_once.forced and one.is_over == all_at_once.is_over


def test_a_long_reasoning_is_read_quickly(engine: Engine) -> None:
    """The step of all rows waits for it."""
    ids = ids_of("Hm, and so on. " * 10_000)
    state = BudgetState(budget(len(ids) + 1), Pieces(engine.tokenizer))
    began_s = time.thread_time()
    state.push_all(ids)
    assert time.thread_time() - began_s < 0.2 and not state.forced
    state.push_all(ids[:1])
    assert state.forced == ids_of(CLOSING)


@pytest.mark.parametrize(("num", "text"), [(1, "é"), (2, "hé"), (1, "€"), (1, "😀"), (3, "😀")])
def test_a_character_is_completed(engine: Engine, num: int, text: str) -> None:
    assert written(engine, budget(num), text * 9) == text + CLOSING + text * 8


def test_bytes_that_never_become_a_character_do_not_go_on_for_ever(engine: Engine) -> None:
    state = BudgetState(budget(2), Pieces(engine.tokenizer))
    for _ in range(5):
        assert not state.forced
        state.push_all([ids_of("😀")[0]])
    assert state.forced == ids_of(CLOSING)


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        (b"", True),
        (b"a", True),
        ("é".encode(), True),
        ("é".encode()[:1], False),
        ("a€".encode()[:2], False),
        ("a€".encode()[:3], False),
        ("a€".encode(), True),
        ("😀".encode()[:3], False),
        ("😀".encode(), True),
        (b"\x80" * 6, True),
    ],
)
def test_complete_characters(text: bytes, complete: bool) -> None:
    assert is_complete(text) == complete


def test_the_ids_before_are_the_models_own(folder: Path) -> None:
    """And the row needs no masks before and after: no order is sent for them."""
    with Structured(folder) as structured:
        free, limited = Seq(options()), Seq(options(reasoning_budget=budget(7)))
        structured.run(free, limited, max_tokens=30)
        assert limited.output[:7] == free.output[:7]
        assert text_of(limited.output[7:]).startswith(CLOSING)
        closed = len(ids_of(CLOSING))
        num_orders = structured.runner.masks._ticket
        assert closed <= num_orders <= closed + 1
        again = Seq(options(reasoning_budget=budget(7)))
        structured.run(again, max_tokens=30)
        assert again.output == limited.output


def test_a_row_goes_on_in_the_closing_words(folder: Path) -> None:
    """Wherever it is added again, as after a preemption or the death of the executor."""
    with Structured(folder) as structured:
        whole = Seq(options(reasoning_budget=budget(4)))
        structured.run(whole, max_tokens=24)
        for cut in range(1, 24):
            rest = Seq(options(reasoning_budget=budget(4)), output=whole.output[:cut])
            structured.run(rest, max_tokens=24)
            assert rest.output == whole.output


def test_a_grammar_holds_behind_the_end(folder: Path) -> None:
    grammar = r'start: /[^<]*/ "</t>" /[0-9]{4}/'
    with Structured(folder) as structured:
        seqs = [Seq(options(grammar, seed=seed, reasoning_budget=budget(6))) for seed in range(4)]
        structured.run(*seqs, max_tokens=60)
        for seq in seqs:
            assert not seq.error
            assert re.fullmatch(r"[^<]{0,20}</t>[0-9]{4}", seq.text)
        assert any(CLOSING in seq.text for seq in seqs)


def requests() -> list[Request]:
    grammar = r'start: /[^<]*/ "</t>" /[0-9]{14}/'
    fields: list[tuple[tuple[str, Any], ...]] = [
        (("reasoning_budget", budget(9)),),
        (("reasoning_budget", budget(5)), ("compiled_grammar", grammar)),
        (),
        (("reasoning_budget", budget(20)), ("num_logprobs", 1)),
        (("compiled_grammar", lark("[a-z]{24}")),),
        (("reasoning_budget", budget(2, is_open=False)),),
    ]
    return [
        Request(
            tuple(ids_of(f"say {i}: ")), 60, seed=i if i % 2 else GREEDY, n=1 + i % 2, at_step=2 * i, fields=fields[i]
        )
        for i in range(6)
    ]


def test_outputs_do_not_depend_on_scheduling(folder: Path) -> None:
    """With steps in flight, preemption, swap, and with ids that are proposed: the closing words are."""
    found = []
    for depth, num_blocks, num_swap_blocks, drafts in (
        (1, 200, 0, 0), (1, 14, 0, 0), (2, 14, 0, 0), (2, 16, 12, 0), (1, 200, 0, 6), (2, 14, 0, 6),
    ):  # fmt: skip
        runner = make_runner(
            folder, BLOCK_BYTES, num_blocks, num_swap_blocks=num_swap_blocks, num_speculative_tokens=drafts
        )
        try:
            pair = Pair(runner, depth, adaptive_speculation=False)
            if runner.speculator is not None:
                runner.speculator.proposer = Wrong()
            found.append(pair.run(requests()))
            assert (pair.scheduler.load().num_preemptions > 0) == (num_blocks < 100)
            if drafts:
                assert pair.scheduler.speculation.counts().num_accepted_tokens > len(ids_of(CLOSING))
        finally:
            runner.close()
    assert found[1:] == found[:1] * (len(found) - 1)
    for request, texts in zip(requests(), found[0], strict=True):
        limit: Any = dict(request.fields).get("reasoning_budget")
        for ids in texts if limit is not None and limit.is_open else ():
            head = text_of(ids)[: limit.num_tokens + len(CLOSING) + 4]
            assert CLOSING in head or EOS in ids or "</t>" in head


@pytest.mark.parametrize("anywhere", [False, True])
def test_an_end_that_the_client_asks_for(folder: Path, anywhere: bool) -> None:
    """Wherever a row begins after it, the output that follows what the client has is the same."""
    free = budget(2**31 - 1, anywhere=anywhere)
    now = msgspec.structs.replace(free, ends_now=True)
    with Structured(folder) as structured:
        before, again = Seq(options(reasoning_budget=free)), Seq(options())
        structured.run(before, again, max_tokens=9)
        assert before.output == again.output and structured.runner.masks._ticket == 0
        whole = Seq(options(reasoning_budget=now), output=before.output[:9])
        structured.run(whole, max_tokens=40)
        assert whole.output[:9] == before.output and text_of(whole.output[9:]).startswith(CLOSING)
        for cut in range(9, 40):
            rest = Seq(options(reasoning_budget=now), output=whole.output[:cut])
            structured.run(rest, max_tokens=40)
            assert rest.output == whole.output


def test_an_end_holds_for_reasoning_that_is_opened_later(engine: Engine) -> None:
    state = BudgetState(budget(9, is_open=False, anywhere=True), Pieces(engine.tokenizer))
    state.end_now()
    for token in ids_of("ab<t>"):
        assert not state.forced
        state.push_all([token])
    assert state.forced == ids_of(CLOSING)


def test_an_end_within_a_character_completes_it(engine: Engine) -> None:
    state = BudgetState(budget(9), Pieces(engine.tokenizer))
    first, second = ids_of("é")
    state.push_all([first])
    state.end_now()
    assert not state.forced
    state.push_all([second])
    assert state.forced == ids_of(CLOSING)


def test_a_mark_may_end_within_an_id(engine: Engine) -> None:
    """Of a model that may reason anywhere, whose marks are no tokens of their own."""
    pieces = Pieces(engine.tokenizer)
    pieces |= {1000: b"a <t", 1001: b">H", 1002: b"m</t>Y"}
    state = BudgetState(budget(2, is_open=False, anywhere=True), pieces)
    state.push_all([1000, 1001])
    assert not state.forced
    state.push_all([1002])
    assert not state.forced and not state.is_over
    state.push_all([1000, 1001, *ids_of("m")])
    assert state.forced == ids_of(CLOSING)
