"""Outcomes of grammar checks are cached, and slow grammars are paced."""

import asyncio
import time

import pytest

from pipeline.runtime import messages as m
from pipeline.stages.ingest import grammar_checker
from pipeline.stages.ingest.grammar_checker import CheckOutcome, GrammarChecker
from tests.stages.ingest.test_grammar_checker import grammars as grammars
from tests.stages.ingest.test_grammar_checker import rejected


@pytest.fixture
def num_queries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of the grammars that the process was asked for."""
    really, asked = GrammarChecker._checked, list[str]()

    async def checked(checker: GrammarChecker, grammar: m.Grammar, key: bytes, scope: str) -> CheckOutcome:
        asked.append(grammar.source)
        return await really(checker, grammar, key, scope)

    monkeypatch.setattr(GrammarChecker, "_checked", checked)
    return asked


async def test_results_of_checks_are_cached(grammars: GrammarChecker, num_queries: list[str]) -> None:
    good, bad = m.Grammar("regex", "a+"), m.Grammar("regex", "(", "guided")
    text = await grammars.check(good)
    assert await grammars.check(good) == text
    for _ in range(2):
        await rejected(grammars, bad.kind, bad.source)
    assert num_queries == ["a+", "("]
    await rejected(grammars, "grammar", "a+")  # another kind


async def test_prompts_with_one_grammar_have_it_checked_once(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch, num_queries: list[str]
) -> None:
    """A thousand prompts of one request would fill the cache with one outcome, and the process with their checks. Also
    if it is slow, only one takes a turn."""
    monkeypatch.setattr(grammar_checker, "SLOW_S", 0.0)
    monkeypatch.setattr(grammar_checker, "SHARE", 0.001)
    grammar = m.Grammar("regex", "a+")
    first, *others = (asyncio.create_task(grammars.check(grammar, "a")) for _ in range(100))
    await asyncio.sleep(0)
    others[0].cancel()
    assert len({await task for task in (first, *others[1:])}) == 1
    assert num_queries == ["a+"] and not grammars._asked


async def test_a_check_is_repeated_if_the_first_is_cancelled(grammars: GrammarChecker, num_queries: list[str]) -> None:
    first, second = (asyncio.create_task(grammars.check(m.Grammar("regex", "a+"), "a")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second
    assert num_queries == ["a+", "a+"]


async def test_the_cache_counts_an_outcome_once(grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two keys may have the same grammar checked at once. Counted twice, the cache would seem full for ever."""
    for source in ("a{1,20}", "b{1,20}"):
        checks = (grammars.check(m.Grammar("regex", source), scope) for scope in ("a", "b", "c"))
        assert len({*await asyncio.gather(*checks)}) == 1
    assert grammars._known_bytes == sum(map(grammar_checker._size, grammars._known.values()))
    monkeypatch.setattr(grammar_checker, "MAX_KNOWN_BYTES", 1)
    assert await grammars.check(m.Grammar("regex", "c"))  # larger than the cache
    assert (grammars._known_bytes, len(grammars._known)) == (0, 0)


async def test_a_slow_grammar_that_the_executor_has_dropped_takes_a_turn_again(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More outcomes are cached here than the executor keeps grammars. A client that sends slow ones in turns would have
    each prepared again, as often as it likes."""
    monkeypatch.setattr(grammar_checker, "SLOW_S", 0.0)
    monkeypatch.setattr(grammar_checker, "SHARE", 100.0)
    monkeypatch.setattr(grammar_checker, "MAX_PREPARED", 2)
    for source in ("a", "b", "c"):
        await grammars.check(m.Grammar("regex", source))
    grammars._next_slow_s = time.monotonic() + 100
    for source in ("b", "c", "b"):
        await grammars.check(m.Grammar("regex", source))
    assert (await rejected(grammars, "regex", "a")).status == 503


async def test_slow_grammars_are_accepted_one_at_a_time(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may delay a step for as long as its check took."""
    monkeypatch.setattr(grammar_checker, "SLOW_S", 0.0)
    monkeypatch.setattr(grammar_checker, "SHARE", 0.005)
    await grammars.check(m.Grammar("regex", "a"))
    next_slow_s = grammars._next_slow_s
    assert next_slow_s > time.monotonic()
    await grammars.check(m.Grammar("regex", "b"))
    assert time.monotonic() >= next_slow_s
    grammars._next_slow_s = time.monotonic() + 100
    assert (await rejected(grammars, "regex", "c")).status == 503
    assert await grammars.check(m.Grammar("regex", "a"))  # a cached result is immediate


async def test_slow_grammars_of_a_key_do_not_delay_those_of_others_for_long(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "SLOW_S", 0.0)
    monkeypatch.setattr(grammar_checker, "SHARE", 0.02)
    await grammars.check(m.Grammar("regex", "first"), "a")
    checks = [asyncio.create_task(grammars.check(m.Grammar("regex", f"a{{{i}}}"), "a")) for i in range(1, 12)]
    async with asyncio.timeout(10):
        while grammars._slow_gate.num_waiting < 10:
            await asyncio.sleep(0.005)
    await grammars.check(m.Grammar("regex", "b"), "b")
    assert sum(check.done() for check in checks) <= 3
    for check in checks:
        check.cancel()
    await asyncio.gather(*checks, return_exceptions=True)
    assert not grammars._slow_s
