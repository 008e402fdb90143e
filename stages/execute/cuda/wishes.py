"""The draw of a step in which somebody wants more than an id: masks, shaped logits, records.

    logits ──► what records need of them ──► masks, shaping ──► draw ──► records of the ids

No graph holds these launches, for which of them there are differs from step to step.
"""

import time

import numpy as np

from pipeline.kernels.step_inputs import IntArray
from pipeline.kernels.triton import record, shape
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.graphs import Steps
from pipeline.stages.execute.cuda.model import DeviceModel
from pipeline.stages.execute.cuda.rows import DeviceRows
from pipeline.stages.execute.masks import LATE_MS, Masks
from pipeline.stages.execute.rows import RowTable

LOOK_S = 50e-6
"""Between two looks whether masks are complete."""


class Wishes:
    """Owned by the runner."""

    def __init__(self, device: Device, model: DeviceModel, steps: Steps, rows: DeviceRows, max_num_rows: int) -> None:
        self._device, self._model, self._steps, self._rows = device, model, steps, rows
        self._max_num_rows = max_num_rows
        vocab_size = model.logits.shape[1]
        self._shape_scratch = shape.ShapeScratch(max_num_rows, vocab_size, device.where)
        self._record_scratch = record.RecordScratch(max_num_rows, vocab_size, device.where)

    def mask(self, masks: Masks, rows: IntArray, table: RowTable) -> tuple["Masked | None", dict[int, str]]:
        """The masks of a step that draws for `rows`, all of whose ids are known here, while the GPU computes its
        logits. Returns None where there are none; and the rows that can have none, with the reasons, which will draw
        nothing."""
        places = masks.ask(rows, table.ids, table.num_ids)
        if not len(places):
            return None, {}
        end_s = time.monotonic() + LATE_MS / 1000
        while not masks.is_done():
            if time.monotonic() > end_s:
                masks.wait()
            else:
                time.sleep(LOOK_S)
        failed = masks.take_failed()
        words, flags = masks.words[: len(rows)].copy(), np.zeros(len(rows), np.int32)
        flags[places] = 1
        for place in failed:
            words[place], flags[place] = 0, 1
        return Masked(self._device.send(words.view(np.int32)), self._device.send(flags)), {
            int(rows[place]): why for place, why in failed.items()
        }
