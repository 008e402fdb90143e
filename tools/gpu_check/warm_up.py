"""What `speed` launches, compiled beforehand: a model of two layers does what is measured of all of them, once.

It runs beside the checks, and takes its time from no measurement. Graphs are then recorded as fast as where a server
has run before.
"""

import time
from collections.abc import Iterator
from functools import partial

from tools.gpu_check.child import Context, Item
from tools.gpu_check.machine import COPY, MATMUL, READ
from tools.gpu_check.readings import Reading
from tools.gpu_check.speed import MODELS, Model, measure


def items(context: Context) -> list[Item]:
    return [Item(f"kernels of {model.name}", partial(_start, model=model), 1, 130) for model in MODELS]


def _start(context: Context, model: Model) -> Iterator[Reading]:
    # Beside others a rate would mean nothing, and takes gigabytes to measure.
    context.task.rates.update({COPY: 1.0, READ: 1.0, MATMUL: 1.0})
    began_s = time.perf_counter()
    for _ in measure(context, model, is_warm_up=True):
        pass
    took_s = time.perf_counter() - began_s
    note = "all that its steps launch, compiled beside other processes"
    yield Reading(f"first start of {model.name}, two layers", took_s, "s", less_is_better=True, note=note)
