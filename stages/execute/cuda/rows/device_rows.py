"""The copy of the row table on the GPU, and the changes that keep it in sync.

The host's table holds a row's initial state and its sampling parameters. Sampled ids are on the GPU first. Changes are
collected while a step's message is read, and are sent to the GPU before the step.
"""

import numpy as np
import torch

from pipeline.kernels.sampling.logits_processor_inputs import LogitsProcessors, num_words
from pipeline.kernels.step_inputs import IntArray, LongArray
from pipeline.kernels.triton.rows import NUM_FIELDS, Field, RowState
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.rows.device_allocator import DeviceAllocator
from pipeline.stages.execute.cuda.rows.staging import Run
from pipeline.stages.execute.rows import GroupArray, RowTable
from pipeline.stages.execute.sampling_features import SamplingFeature

LIST_MEMORY_WORDS = 4 * 1024**2
"""For the lists of logits processors: 16 MiB."""

NO_ROOM = "The GPU memory for logit_bias, bad_words and allowed_token_ids is full: try again later"


class DeviceRows:
    """Owns the memory of rows on the device: one for each row of the table, and a padding row."""

    def __init__(self, device: Device, table: RowTable, max_num_stops: int) -> None:
        self._table = table
        num_rows, max_model_len = table.ids.shape[0] + 1, table.ids.shape[1]
        shapes = {
            "params": (num_rows, NUM_FIELDS),
            "ids": (num_rows, max_model_len),
            "blocks": (num_rows, table.group_blocks.shape[0] * table.group_blocks.shape[2]),
            "stops": (num_rows, max_num_stops),
            "list_memory": (LIST_MEMORY_WORDS,),
        }
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        state = torch.zeros(sum(sizes), dtype=torch.int32, device=device.where)
        begins = np.cumsum([0, *sizes[:-1]]).tolist()
        views = [
            state.narrow(0, *part).view(shape) for *part, shape in zip(begins, sizes, shapes.values(), strict=True)
        ]
        self._params, self._ids, self._blocks, self._stops, self._list_memory = begins
        self._max_num_stops = max_num_stops
        self.on_device = RowState(state, *views[:4])
        self.list_memory = views[4]
        self._list_allocator = DeviceAllocator(LIST_MEMORY_WORDS)
        self._nothing = self._list_allocator.allocate(num_words(table.vocab_size)) or 0
        """Offset of a mask that allows no token."""
        self._list_ranges: dict[int, tuple[int, int]] = {}
        self.on_device.params[-1, Field.ENDED] = 1
        self.runs: list[Run] = []
        """Changes that have not been sent to the device."""
        self.filtered: set[int] = set()
        """Rows with top_k, top_p or min_p."""
        self._verified: dict[int, int] = {}
        """Rows with ids that the host has verified and not sent, and the number of ids before these."""

    def add(self, row: int) -> str | None:
        """Copy a row that was added to the table. Returns an error if its sequence can't run."""
        table = self._table
        num_ids, stops = int(table.num_ids[row]), sorted(table.stops[row])
        assert len(stops) <= self._max_num_stops, f"row {row} has {len(stops)} stop ids, {self._max_num_stops} at most"
        params = np.zeros(NUM_FIELDS, np.int32)
        floats, key = params.view(np.float32), table.keys[row : row + 1].view(np.int32)
        params[Field.NUM_IDS], params[Field.NUM_PROMPT] = num_ids, table.num_prompt[row]
        params[Field.NUM_STOPS] = len(stops)
        floats[Field.TEMPERATURE], floats[Field.TOP_P] = table.temperature[row], table.top_p[row]
        floats[Field.MIN_P], params[Field.TOP_K] = table.min_p[row], table.top_k[row]
        params[Field.KEY_LOW], params[Field.KEY_HIGH] = key
        params[Field.NUM_TOP] = table.num_logprobs[row]
        params[Field.ADAPTER] = table.adapters[row] + 1
        problem = None
        if (processors := table.logits_processors[row]) is not None:
            problem = self._store_logits_processors(row, params, processors)
        if table.features[row] & SamplingFeature.RANDOM and (
            table.top_p[row] < 1 or table.min_p[row] > 0 or table.top_k[row] > 0
        ):
            self.filtered.add(row)
        self.runs.append((self._params + row * NUM_FIELDS, params))
        self.runs.append((self._ids + row * table.ids.shape[1], table.ids[row, :num_ids]))
        for group, end in enumerate(table.block_ends[:, row].tolist()):
            self.runs.append((self._begin_of_table(group, row), table.group_blocks[group, row, :end].copy()))
        if stops:
            self.runs.append((self._stops + row * self._max_num_stops, np.array(stops, np.int32)))
        return problem

    def propose(self, rows: IntArray, num_drafts: LongArray) -> None:
        """Send the ids that were proposed for these rows, which are behind their known ids in the table."""
        for index in np.flatnonzero(num_drafts).tolist():
            row, num = int(rows[index]), int(num_drafts[index])
            known = int(self._table.num_ids[row])
            self.runs.append((self._offset_of(row, known), self._table.ids[row, known : known + num].copy()))

    def verified(self, rows: IntArray, num_known: IntArray) -> None:
        """The table has new ids of these rows, from the first `num_known` on, and whether the rows have ended. They are
        sent with the next step, unless the row is dropped before."""
        self._verified |= zip(rows.tolist(), num_known.tolist(), strict=True)

    def take_runs(self) -> list[Run]:
        """All changes that have not been sent."""
        runs, self.runs = self.runs, []
        table = self._table
        for row, begin in self._verified.items():
            end, has_ended = int(table.num_ids[row]), int(table.ended[row])
            runs.append((self._params + row * NUM_FIELDS, np.array([end, has_ended], np.int32)))
            if end > begin:
                runs.append((self._offset_of(row, begin), table.ids[row, begin:end].copy()))
        self._verified.clear()
        return runs

    def _offset_of(self, row: int, position: int) -> int:
        """The offset of an id of a row."""
        begin: int = self._ids + row * self._table.ids.shape[1] + position
        return begin

    def append_blocks(self, rows: IntArray, blocks: IntArray, groups: GroupArray) -> None:
        """Append blocks to the table and to the device."""
        indices = self._table.append_blocks(rows, blocks, groups)
        of = groups.tolist() if len(groups) else [0] * len(indices)
        for i, (row, group, index) in enumerate(zip(rows.tolist(), of, indices, strict=True)):
            self.runs.append((self._begin_of_table(group, row) + index, blocks[i : i + 1]))

    def _begin_of_table(self, group: int, row: int) -> int:
        """The offset of a row's block table in a KV group."""
        num_groups, _, width = self._table.group_blocks.shape
        begin: int = self._blocks + (row * num_groups + group) * width
        return begin

    def drop(self, rows: IntArray) -> None:
        """Free the lists of dropped rows. The device does not read a dropped row before it is reused."""
        if self._verified:
            for row in rows.tolist():
                self._verified.pop(row, None)
        if self.filtered or self._list_ranges:
            for row in rows.tolist():
                self.filtered.discard(row)
                if (taken := self._list_ranges.pop(row, None)) is not None:
                    self._list_allocator.free(*taken)

    def _store_logits_processors(self, row: int, params: IntArray, processors: LogitsProcessors) -> str | None:
        """Store a row's lists in the list memory and their offsets in `params`. Returns an error if it is full."""
        floats = params.view(np.float32)
        params[Field.HAS_LOGITS_PROCESSORS] = 1
        floats[Field.REPETITION], floats[Field.PRESENCE] = processors.repetition, processors.presence
        floats[Field.FREQUENCY], params[Field.MIN_TOKENS] = processors.frequency, processors.min_tokens
        params[Field.NUM_ENDERS], params[Field.NUM_BIAS] = len(processors.enders), len(processors.bias_ids)
        params[Field.NUM_RUNS], params[Field.ALLOWED_AT] = processors.num_runs, -1
        lists = [processors.enders, processors.bias_ids, processors.bias_values.view(np.int32), processors.runs]
        if processors.allowed is not None:
            lists.append(processors.allowed.view(np.int32))
        numbers = np.concatenate(lists)
        if not len(numbers):
            return None
        begin = self._list_allocator.allocate(len(numbers))
        if begin is None:
            params[[Field.NUM_ENDERS, Field.NUM_BIAS, Field.NUM_RUNS]] = 0
            params[Field.ALLOWED_AT] = self._nothing
            return NO_ROOM
        self._list_ranges[row] = begin, len(numbers)
        ends = (begin + np.cumsum([len(each) for each in lists])).tolist()
        params[Field.ENDERS_AT], params[Field.BIAS_AT], params[Field.RUNS_AT] = begin, ends[0], ends[2]
        if processors.allowed is not None:
            params[Field.ALLOWED_AT] = ends[3]
        self.runs.append((self._list_memory + begin, numbers))
        return None
