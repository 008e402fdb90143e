"""Every template ends: in time, within bounds, and with a result."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.runtime.messages import ChatMessage, ChatPrompt
from pipeline.stages.ingest.templates.budget import MAX_VALUE_CHARS, Budget, OutOfTime, ValueTooLarge
from pipeline.stages.ingest.templates.chat_templates import ChatTemplates, NeedsTime
from pipeline.stages.ingest.templates.template import ChatTemplate, TemplateFailure
from tests.stages.ingest.templates.chats import render

ROOT = Path(__file__).parents[4]
USER = ChatPrompt([ChatMessage("user", "hi")])

FOR_EVER = {
    "silent loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that take nothing": "{% for a in range(99999) %}{% for b in range(99999) if 0 %}{% endfor %}{% endfor %}",
    "filters": "{% for a in range(99999) if range(99999)|select('odd')|list|length == 3 %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "callers": (
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% macro g(n) %}{% if n %}{% call f() %}{{ g(n - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ g(25) }}"
    ),
    "recursive loops": "{% for x in [1, 1] if x recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    "blocks": "{% block a %}{% for i in range(999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endblock %}",
    "searches": "{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% if 'b' in s %}{% endif %}{% endfor %}",
    "comparisons": (
        "{% set s = 'a' * 4000000 + 'c' %}{% set t = 'a' * 4000000 + 'b' %}"
        "{% for i in range(99999) %}{% if s == t %}{% endif %}{% endfor %}"
    ),
    "methods": "{% set s = 'a b' * 999999 %}{% for i in range(99999) %}{% if s.split() %}{% endif %}{% endfor %}",
    "slices": "{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% if s[1:] %}{% endif %}{% endfor %}",
    "arguments": (
        "{% macro f() %}{{ varargs|length }}{% endmacro %}{% for i in range(99999) %}{{ f(*range(99999)) }}{% endfor %}"
    ),
    "cyclers": "{% set c = cycler('') %}{% for i in range(99999) %}{{ c.next() }}{{ c.next() }}{% endfor %}",
    "title": "{% set s = 'a ' * 2000000 %}{% for i in range(99999) %}{% if s|title %}{% endif %}{% endfor %}",
    "texts that are kept": (
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
        "{% set ns.x = ns.x + ['💥' * 999999 ~ i] %}{% endfor %}"
    ),
    "lists that are kept": (
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
        "{% set ns.x = [ns.x, range(99999)|list] %}{% endfor %}"
    ),
}

DOUBLED = (
    "{{% set ns = namespace(x={first}) %}}{{% for i in range(60) %}}{{% set ns.x = {twice} %}}{{% endfor %}}{last}"
)


def doubled(first: str, twice: str, last: str = "") -> str:
    return DOUBLED.format(first=first, twice=twice, last=last)


def shared(use: str) -> str:
    """Two equal lists that are small in memory and long to write out."""
    return (
        "{% set ns = namespace(x=(1,), y=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}"
        "{% set ns.y = (ns.y, ns.y) %}{% endfor %}{% set x = ns.x %}{% set y = ns.y %}" + use
    )


HUGE = {
    "*": "{{ 'x' * 10**9 }}",
    "* from the right": "{{ 10**9 * 'x' }}",
    "* of a list": "{% set x = [1] * 10**9 %}",
    "**": "{{ 10 ** (10 ** 8) }}",
    "* of numbers": doubled("3", "ns.x * ns.x"),
    "+": doubled("'x'", "ns.x + ns.x"),
    "+ of lists": doubled("[1]", "ns.x + ns.x"),
    "~": doubled("'x'", "ns.x ~ ns.x"),
    "join": doubled("'xx'", "[ns.x, ns.x]|join"),
    "str.join": doubled("'xx'", "ns.x.join([ns.x, ns.x])"),
    "str.join of what is mapped": doubled("'xx'", "ns.x.join([ns.x, ns.x]|map('upper'))"),
    "replace": doubled("'xx'", "ns.x|replace('x', ns.x)"),
    "str.replace": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "str.format": doubled("'x'", "'{0}{0}'.format(ns.x)"),
    "%": doubled("'x'", "'%s%s' % (ns.x, ns.x)"),
    "% by name": doubled("'x'", "'%(a)s%(a)s' % {'a': ns.x}"),
    "widths": "{{ '{:>999999999}'.format(1) }}",
    "widths in widths": "{{ '{:>{}}'.format(1, 999999999) }}",
    "digits": "{{ '%.999999999f' % 3 }}",
    "widths from arguments": "{{ '%*d' % (999999999, 3) }}",
    "format": "{{ '%0999999999d'|format(3) }}",
    "center": "{{ 'x'|center(10**9) }}",
    "str.center": "{{ 'x'.center(10**9) }}",
    "str.zfill": "{{ 'x'.zfill(10**9) }}",
    "str.expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "indent": "{{ 'x'|indent(10**9, true) }}",
    "indent by a text": "{{ ('x\n' * 100000)|indent('y' * 100000) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list|length }}",
    "slice": "{{ [1]|slice(10**9)|list|length }}",
    "round": "{{ 5|round(-10**9) }}",
    "int": "{{ ('f' * 4000000)|int(0, 16) }}",
    "times": "{{ strftime_now('%999d' * 400000) }}",
    "tojson": "{{ [1]|tojson(indent=10**9) }}",
    "strip": "{{ ('a' * 1000000).strip('b' * 1000000 + 'a') }}",
    "trim": "{{ ('a' * 1000000)|trim('b' * 1000000 + 'a') }}",
    "set blocks": "{% set y %}{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}{% endset %}",
    "shared, written": shared("{{ x }}"),
    "shared, joined": shared("{{ [x]|join }}{{ x ~ '' }}"),
    "shared, as text": shared("{{ x|string|length }}"),
    "shared, centred": shared("{{ x|center|length }}"),
    "shared, as JSON": shared("{{ x|tojson }}"),
    "shared, as JSON with indents": shared("{{ x|tojson(indent=1) }}"),
    "shared, formatted": shared("{{ '{!r}'.format(x) }}"),
    "shared, compared": shared("{{ x == y }}"),
    "shared, compared by a test": shared("{{ x is eq y }}"),
    "shared, selected": shared("{{ [x]|select('eq', y)|list|length }}"),
    "shared, searched": shared("{{ x in [y] }}"),
    "shared, counted": shared("{{ [x].count(y) }}"),
    "shared, sorted": shared("{{ [x, y]|sort|length }}"),
    "shared, hashed": shared("{{ {}[x] }}"),
    "shared, hashed by get": shared("{{ {}.get(x) }}"),
    "shared, a key": shared("{% set d = {x: 1} %}"),
    "shared, unique": shared("{{ [x, y]|unique|list|length }}"),
    "shared, changed": shared("{% for i in [x, y] %}{{ loop.changed(i) }}{% endfor %}"),
    "shared by items": doubled("{}", "{'a': ns.x.items(), 'b': ns.x.items()}", "{{ ns.x }}"),
    "shared by groups": doubled("1", "[{'a': 1, 'b': ns.x}, {'a': 1, 'b': ns.x}]|groupby('a')", "{{ ns.x }}"),
}

REFUSED = {
    "codecs": "{{ 'ü'.encode('idna') }}",
    "tables": "{{ 'a'.translate({97: 'b'}) }}",
    "bytes": "{{ (5).to_bytes(10**9, 'big') }}",
    "generators": "{{ ([1]|map('string')).send(1) }}",
    "types": "{{ dict.mro() }}",
    "attr": "{{ (''|attr('__class__')).mro }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
}


@pytest.mark.parametrize("name", FOR_EVER)
def test_endless_templates_are_stopped_by_the_step_limit(name: str) -> None:
    with pytest.raises(OutOfTime):
        render(FOR_EVER[name], USER, num_steps=20_000)


@pytest.mark.parametrize("name", HUGE)
def test_huge_values_are_never_created(name: str) -> None:
    with pytest.raises((TemplateFailure, OutOfTime)) as caught:
        render(HUGE[name], USER, num_steps=400_000)
    if isinstance(caught.value, TemplateFailure):
        assert "exceeds its limits: it " in str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_unsafe_operations_are_rejected(name: str) -> None:
    with pytest.raises(TemplateFailure, match="refused the messages"):
        render(REFUSED[name], USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% autoescape true %}{% endautoescape %}",
        *("{{ [1]|random }}", "{{ ''|urlize }}", "{{ ''|striptags }}", "{{ ''|wordwrap }}", "{{ ''|pprint }}"),
        " " * (2**18 + 1),
    ],
)
def test_a_template_with_unknown_names_is_invalid(source: str) -> None:
    with pytest.raises(TemplateFailure, match="chat template is"):
        ChatTemplate(source)


def test_an_invalid_template_names_its_line() -> None:
    for source in ("{{ a }}\n\n{% if %}", "\n\n{{ a|nofilter }}", "\n\n{% foo %}"):
        with pytest.raises(TemplateFailure, match=r"not valid: [^\n]+ \(line 3\)$"):
            ChatTemplate(source)


ALL_IN_MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from tests.stages.ingest.templates.test_bounds import FOR_EVER, HUGE, USER
from pipeline.stages.ingest.templates.budget import OutOfTime
from pipeline.stages.ingest.templates.template import TemplateFailure
from tests.stages.ingest.templates.chats import render
for name, source in (HUGE | FOR_EVER).items():
    try:
        render(source, USER, num_steps=400_000 if name in HUGE else 50_000)
    except (TemplateFailure, OutOfTime) as error:
        assert "MemoryError" not in str(error), name
print("done")
"""


def test_a_gigabyte_is_enough_for_all_these_templates() -> None:
    result = subprocess.run(
        [sys.executable, "-c", ALL_IN_MEMORY], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_the_clock_stops_a_template_on_a_slow_machine() -> None:
    seconds = iter(range(10**9))
    budget = Budget(10**9, 5.0, lambda: float(next(seconds)))
    with pytest.raises(OutOfTime):
        while True:
            budget.spend(100)
    assert next(seconds) < 10


def test_a_template_has_more_steps_on_a_thread_than_in_the_loop() -> None:
    source = "{% set ns = namespace(n=0) %}{% for i in range(20000) %}{% set ns.n = i %}{% endfor %}{{ ns.n }}"
    chats = ChatTemplates({"default": ChatTemplate(source)}, "", timeout_s=60.0)
    with pytest.raises(NeedsTime):
        chats.text(USER, max_chars=100, now_s=1.0, is_short=True)
    assert chats.text(USER, max_chars=100, now_s=1.0, is_short=False) == "19999"


def test_a_shared_value_counts_twice_but_is_measured_once() -> None:
    nested: list[object] = [1]
    for _ in range(12):
        nested = [nested, nested]
    budget = Budget(100)
    assert budget.weight(nested) > 2**12
    for _ in range(12):
        nested = [nested, nested]
    with pytest.raises(ValueTooLarge, match=str(MAX_VALUE_CHARS)):
        Budget(1000).weight(nested)


def test_loading_a_template_computes_nothing() -> None:
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for source in HUGE.values():
        ChatTemplate(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    assert time.monotonic() - began < 30
