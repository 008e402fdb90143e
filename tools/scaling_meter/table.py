"""All cases."""

from collections.abc import Iterator

from tools.scaling_meter import bodies, others, outputs, pairs, replies, schemas, stored, tokenizers
from tools.scaling_meter.case import Case


def all_cases() -> Iterator[Case]:
    for module in (others, outputs, pairs, schemas, replies, stored, tokenizers, bodies):
        yield from module.cases()
