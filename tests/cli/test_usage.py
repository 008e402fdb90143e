"""`pipeline usage`: the table fits 80 columns, and JSON has the fields of /metrics."""

import io

from rich.console import Console

from pipeline.cli.watch.usage import plain, table
from pipeline.metrics.stats import KeyUsage, ServerStats

MANY = 999_999_999


def lines_of(*keys: KeyUsage) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80).print(table(list(keys)))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_table_has_the_key_with_most_tokens_first_and_a_sum() -> None:
    assert [line.split() for line in lines_of(KeyUsage("a", 1, 10, 5, 2), KeyUsage("b", 2, 20, 5, 2, 1, 1, 1))] == [
        ["key", "requests", "prompt", "cached", "output", "rejected"],
        ["b", "2", "20", "5", "2", "3"],
        ["a", "1", "10", "5", "2", "0"],
        ["all", "3", "30", "10", "4", "3"],
    ]


def test_it_fits_80_columns() -> None:
    found = lines_of(KeyUsage("n" * 64, MANY, MANY, MANY, MANY, MANY))
    assert all(len(line) <= 80 for line in found)
    assert found[1].count(str(MANY)) == 5, found


def test_json_has_all_counters() -> None:
    stats = ServerStats("s", 7, "1", "m", "", "serving", 1.5, 2.0, [], keys=[KeyUsage("a", 1, 2, 3, 4, 5, 6, 7)])
    assert plain(stats)["keys"] == [
        {
            "name": "a",
            "requests": 1,
            "prompt_tokens": 2,
            "cached_tokens": 3,
            "output_tokens": 4,
            "rejected": {"rate_limit": 5, "overloaded": 6, "invalid": 7},
        }
    ]
