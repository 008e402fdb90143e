"""Compiles the candidates that `tune` times: each process launches its share of them once."""

from collections.abc import Iterator
from functools import partial

from tools.gpu_check import gpu
from tools.gpu_check.child import Context, Item
from tools.gpu_check.readings import Reading
from tools.gpu_check.speed.tune import REFUSALS, most_of, products


def items(context: Context) -> list[Item]:
    num = context.task.num_processes
    return [Item(f"part {i + 1} of {num}", partial(_launch, part=i), 0, 200) for i in range(num)]


def _launch(context: Context, part: int) -> Iterator[Reading]:
    """Launch this part's share of the candidates, while time is left."""
    launched = refused = number = 0
    for product in products(context):
        (matrix,), x = product.matrices(1), product.x()
        for config in product.candidates(matrix, most_of(context)):
            number += 1
            if number % context.task.num_processes != part:
                continue
            if context.left_s < 3 and not context.interpreted:
                yield Reading(f"compiled, part {part + 1}", launched, note=f"out of time at {product.case}")
                return
            try:
                product.launch(matrix, config, x, product.out(config))
                launched += 1
            except Exception as error:
                if type(error).__name__ not in REFUSALS:
                    raise
                refused += 1
        gpu.synchronize()
    yield Reading(f"compiled, part {part + 1}", launched, note=f"complete; {refused} were refused")
