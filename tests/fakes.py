"""A fake executor without a model. Its KV blocks store the token ids, and the next id is a hash of all ids that it
reads back through the row's block table. A wrong block, a block freed too early, a prefix hit on other content and a
stale row each change the sampled ids, so tests compare exact ids. With several KV groups, each stores the ids in blocks
of its own, and reads those in its window: if they differ from the row's ids, the next ids are wrong. A slot of a
recurrent state has the number of ids that it has absorbed and their hash: it must be at the position where an entry
starts, and if its hash is not that of the row's ids, the next ids are wrong, too. A row of the encoder cache is a hash
of its item's key and its number, which KV blocks store in place of the ids of placeholders.
"""

import random
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.runtime.model.kv_groups import FULL, KVGroup
from pipeline.runtime.token_outputs import logprob_dtype
from pipeline.shm.arrays import Array, ShmRef

VOCAB = 997
SLOW_GRAMMAR, SLOW_S = "slow", 0.2
"""The masks of rows with this grammar take so long."""
EMPTY = -7
"""The content of a KV slot that was never written."""
NO_BLOCK = -1
"""In a block table, at slots that no step may read."""
MAX_GROUPS = 16
PIXELS_PER_KEY = 4
"""An item's pixels are its key as often."""
ENCODE_S = 0.001
"""The reported time to encode a row."""


def next_id(ids: "np.ndarray[Any, Any] | list[int]", seed: int, index: int) -> int:
    """The id that follows `ids`, for a sequence's noise key."""
    data = np.asarray(ids, np.int32).tobytes() + f"{seed}/{index}".encode()
    return int.from_bytes(blake2b(data, digest_size=4).digest(), "little") % VOCAB


def inline(array: Array) -> bytes:
    """The bytes of a message's array, which must not be in shared memory."""
    assert not isinstance(array, ShmRef)
    return array


def encoded(key: bytes, row: int) -> int:
    """What a row of a media item is."""
    return VOCAB + int.from_bytes(blake2b(key + bytes([row]), digest_size=4).digest(), "little") % 10**6


def contents_of(media: list[m.MediaItem]) -> dict[int, int]:
    """What stands at positions of a prompt in place of ids."""
    contents: dict[int, int] = {}
    for item in media:
        positions = [offset + index for offset, length in item.runs for index in range(length)]
        contents |= {position: encoded(item.key, row) for row, position in enumerate(positions)}
    return contents


def logprob(token_id: int) -> float:
    """The fake executor's logprob of an id."""
    return -1 - token_id / 8


def record(token_id: int, num_top: int) -> bytes:
    """The fake executor's logprob record of an id: this id is the most likely one, followed by the next ids."""
    data = np.zeros((), logprob_dtype(num_top))
    data["logprob"] = logprob(token_id)
    data["top_ids"] = token_id + np.arange(num_top)
    data["top_logprobs"] = logprob(token_id) - np.arange(num_top)
    return data.tobytes()


def expected(prompt: list[int], options: m.GenerationOptions, index: int, max_tokens: int) -> tuple[list[int], Finish]:
    """The ids that a sequence must generate."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(next_id(ids, options.seed, index))
        if ids[-1] in options.stop_token_ids:
            return ids[len(prompt) :], Finish.STOP
    return ids[len(prompt) :], Finish.LENGTH


class _Row:
    def __init__(self, add: m.RowAdd, ids: list[int], tables: list["np.ndarray[Any, Any]"]) -> None:
        self.generation = add.generation
        self.index = add.index
        self.options = msgspec.msgpack.decode(add.options, type=m.GenerationOptions)
        self.ids = dict(enumerate(ids))
        firsts = add.first_blocks or [0] * len(tables)
        self.tables: list[list[int]] = [
            [NO_BLOCK] * first + blocks.tolist() for first, blocks in zip(firsts, tables, strict=True)
        ]
        """By KV group."""
        self.contents: dict[int, int] = {}
        """`FakeExecutor.media` of its request."""
        self.run_ends: dict[int, int] = {}
        """`FakeExecutor.run_ends` of its request."""
        self.has_read_wrong = False
        self.num_prompt = add.num_prompt
        self.dead = False

    def prompt_logprobs(self, start: int, count: int) -> list[bytes]:
        """Logprob records of the ids that follow these positions."""
        num_top = self.options.num_prompt_logprobs
        if self.dead or num_top < 0 or self.index > 0:
            return []
        return [
            record(self.ids[position + 1], num_top)
            for position in range(start, min(start + count, self.num_prompt - 1))
        ]


class State(NamedTuple):
    """What a slot has absorbed."""

    position: int
    digest: "blake2b"

    def absorb(self, ids: "np.ndarray[Any, Any]") -> "State":
        digest = self.digest.copy()
        digest.update(ids.tobytes())
        return State(self.position + len(ids), digest)


NO_STATE = State(0, blake2b())


class FakeExecutor:
    """Runs a `Step` and returns its `StepResult`. Asserts that the step is valid."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        take: Callable[[Array, Any], "np.ndarray[Any, Any]"] | None = None,
        put: Callable[["np.ndarray[Any, Any]"], Array] | None = None,
        num_swap_blocks: int = 0,
        token_s: float = 0.001,
        copy_s: float = 0.0001,
        groups: tuple[KVGroup, ...] = (FULL,),
        num_state_slots: int = 0,
        num_swap_state_slots: int = 0,
        num_encoder_rows: int = 0,
    ) -> None:
        """`token_s` and `copy_s` are the reported times to compute a token and to copy a block. Of the ids that it
        proposes, `skill` are right, on average."""
        self._token_s, self.copy_s = token_s, copy_s
        self.skill = 0.7
        self.kv = np.full((num_blocks + num_swap_blocks, block_size), EMPTY, np.int64)
        """The blocks of the KV cache, followed by those of swap space."""
        self.num_blocks = num_blocks
        self.groups = groups
        self.num_copies = 0
        self.num_state_slots = num_state_slots
        self.states: list[State | None] = [None] * (num_state_slots + num_swap_state_slots)
        """Those of the executor, followed by those of swap space."""
        self.rows: dict[int, _Row] = {}
        self.encoder_cache = [EMPTY] * num_encoder_rows
        self.begun: tuple[bytes, int] | None = None
        """The item that is encoded in part, and the end of the last part."""
        self.num_encoded: dict[bytes, int] = {}
        """How often each item was encoded."""
        self.run_ends: dict[int, dict[int, int]] = {}
        """By request, for positions that see those behind them: the first one that they don't see."""
        self.media: dict[int, dict[int, int]] = {}
        """By request: what must stand at positions of its prompt in place of ids."""
        self.block_size = block_size
        self._take = take or (lambda array, dtype: np.frombuffer(inline(array), dtype).copy())
        self._put = put or (lambda array: array.tobytes())

    def _copy(self, sources: list[int], targets: list[int]) -> int:
        for source, target in zip(sources, targets, strict=True):
            assert source != target
            self.kv[target] = self.kv[source]
        self.num_copies += len(sources)
        return len(sources)

    def _read(self, row: int, start: int, count: int) -> None:
        """Read all that a row's positions attend to, in each group."""
        state, size = self.rows[row], self.block_size
        for group, table in enumerate(state.tables):
            window = self.groups[group].window
            first = max(0, start - window + 1) if window else 0
            end = state.run_ends.get(start + count - 1, start + count)
            positions = range(first, end)
            blocks = np.array(table)[first // size : -(-end // size)]
            assert NO_BLOCK not in blocks, f"row {row} reads a place without a block"
            read = self.kv[blocks].reshape(-1)[first % size : first % size + len(positions)]
            assert EMPTY not in read, f"row {row} reads KV that was never written"
            right = [state.contents.get(each, state.ids[each]) * MAX_GROUPS + group for each in positions]
            state.has_read_wrong |= read.tolist() != right

    def _encode(self, step: m.Step) -> dict[tuple[int, int], int]:
        """Encode the step's items. Returns what its positions have in place of ids."""
        take = self._take
        for job in step.encodes:
            slots = take(job.slots, np.int32).tolist()
            assert len(set(slots)) == len(slots) == job.grid[0], "an item has slots for other rows than its own"
            pixels = take(job.pixels, np.uint8).tobytes()
            assert pixels == (b"" if job.first_part else job.key * PIXELS_PER_KEY)
            if job.first_part:
                assert self.begun == (job.key, job.first_part), "a step goes on with an item that was not begun"
            assert job.first_part < job.end_part <= m.NUM_PARTS
            self.begun = None if job.end_part == m.NUM_PARTS else (job.key, job.end_part)
            if self.begun is not None:
                for slot in slots:
                    self.encoder_cache[slot] = EMPTY
                continue
            self.num_encoded[job.key] = self.num_encoded.get(job.key, 0) + 1
            for row, slot in enumerate(slots):
                self.encoder_cache[slot] = encoded(job.key, row)
        slots = iter(take(step.span_slots, np.int32).tolist())
        columns = (take(one, np.int32).tolist() for one in (step.span_rows, step.span_starts, step.span_counts))
        spans = zip(*columns, strict=True)
        contents = {
            (row, position): self.encoder_cache[next(slots)]
            for row, start, count in spans
            for position in range(start, start + count)
        }
        assert next(slots, None) is None
        assert EMPTY not in contents.values(), "a row of the encoder cache is read that was never written"
        return contents

    def _copy_states(self, step: m.Step) -> None:
        sources = self._take(step.state_copy_sources, np.int32).tolist()
        targets = self._take(step.state_copy_targets, np.int32).tolist()
        for source, target in zip(sources, targets, strict=True):
            assert (source < self.num_state_slots) != (target < self.num_state_slots), "a copy within one memory"
            assert self.states[source] is not None, f"slot {source} is copied and was never written"
            self.states[target] = self.states[source]

    def _absorb(self, step: m.Step, entries: list[tuple[int, int, int, int, int]]) -> None:
        """Let the state of each entry absorb its ids."""
        reads, writes = (self._take(slots, np.int32).tolist() for slots in (step.state_reads, step.state_writes))
        assert len(reads) == len(writes) == len(entries)
        assert len(set(writes)) == len(writes), "two entries write the same slot"
        assert all(0 <= slot < self.num_state_slots for slot in writes)
        for index, slot in enumerate(writes):
            assert slot not in reads[:index] + reads[index + 1 :], f"slot {slot} is read and written"
        before = list(self.states)
        for (row, start, count, _, num_drafts), read, write in zip(entries, reads, writes, strict=True):
            row_state = self.rows[row]
            assert not num_drafts
            if row_state.dead:
                continue
            state = before[read] if read >= 0 else NO_STATE
            assert state is not None, f"row {row} reads slot {read}, which was never written"
            assert state.position == start, f"row {row} starts at {start}, its state is at {state.position}"
            ids = np.array([row_state.ids[position] for position in range(start + count)], np.int32)
            self.states[write] = after = state.absorb(ids[start:])
            row_state.has_read_wrong |= after.digest.digest() != blake2b(ids.tobytes()).digest()

    def run(self, step: m.Step) -> m.StepResult:
        take = self._take
        for row in take(step.drops, np.int32).tolist():
            del self.rows[row]
        for add in step.adds:
            assert add.row not in self.rows, f"row {add.row} is in use"
            ids = take(add.ids, np.int32).tolist()
            if add.fork_of >= 0:
                leader = self.rows[add.fork_of]
                ids = [leader.ids[index] for index in range(add.num_prompt)] + ids
            tables = [take(blocks, np.int32) for blocks in (add.blocks, *add.group_blocks)]
            assert len(tables) == len(self.groups)
            self.rows[add.row] = _Row(add, ids, tables)
            self.rows[add.row].contents = self.media.get(add.request_id, {})
            self.rows[add.row].run_ends = self.run_ends.get(add.request_id, {})
        block_rows, block_ids = take(step.block_rows, np.int32).tolist(), take(step.block_ids, np.int32).tolist()
        block_groups = take(step.block_groups, np.uint8).tolist() or [0] * len(block_rows)
        for row, block, group in zip(block_rows, block_ids, block_groups, strict=True):
            self.rows[row].tables[group].append(block)
        num_copies = self._copy(take(step.copy_sources, np.int32).tolist(), take(step.copy_targets, np.int32).tolist())
        assert all(block < self.num_blocks for row in self.rows.values() for table in row.tables for block in table), (
            "a row in swap space"
        )
        self._copy_states(step)
        contents = self._encode(step)
        entries = list(
            zip(
                take(step.rows, np.int32).tolist(),
                take(step.starts, np.int32).tolist(),
                take(step.counts, np.int32).tolist(),
                take(step.samples, np.uint8).tolist(),
                take(step.drafts, np.int32).tolist() or [0] * len(take(step.rows, np.int32)),
                strict=True,
            )
        )
        assert len({row for row, *_ in entries}) == len(entries), "a row is in a step twice"
        written: set[tuple[int, int]] = set()
        proposed: dict[int, list[int]] = {}
        for row, start, count, samples, num_drafts in entries:
            state = self.rows[row]
            assert num_drafts == 0 or (samples and count == 1)
            proposed[row] = [] if state.dead else self._propose(state, start + count, num_drafts)
            for index, token_id in enumerate(proposed[row]):
                state.ids[start + count + index] = token_id
            for group, table in enumerate(state.tables):
                for position in range(start, start + count + len(proposed[row])) if not state.dead else ():
                    slot = table[position // self.block_size], position % self.block_size
                    assert slot[0] != NO_BLOCK, f"row {row} writes position {position}, which has no block"
                    assert slot not in written, f"two rows write slot {slot}"
                    written.add(slot)
                    content = contents.get((row, position), state.ids[position])
                    self.kv[slot] = content * MAX_GROUPS + group
        computed = {(row, start + index) for row, start, count, *_ in entries for index in range(count)}
        assert contents.keys() <= computed, "spans of positions that the step does not compute"
        for row, start, count, *_ in entries:
            if not self.rows[row].dead:
                self._read(row, start, count + len(proposed[row]))
        if self.num_state_slots:
            self._absorb(step, entries)
        sampled: list[int] = []
        sampled_ids: list[int] = []
        num_ids: list[int] = []
        finishes: list[int] = []
        token_outputs: list[bytes] = []
        prompt_logprobs: list[bytes] = []
        errors: list[str] = []
        for row, start, count, samples, _ in entries:
            prompt_logprobs += self.rows[row].prompt_logprobs(start, count)
            if not samples:
                continue
            sampled.append(row)
            state = self.rows[row]
            kept, finish, error = self._sample(row, start + count, proposed[row])
            sampled_ids += kept or [-1]
            num_ids.append(len(kept) or 1)
            finishes.append(int(finish))
            errors += [error] if error else []
            if state.options.num_logprobs >= 0:
                token_outputs += [record(token_id, state.options.num_logprobs) for token_id in kept]
        num_drafts_of = [len(proposed[row]) for row in sampled]
        slow = [row for row in sampled if self.rows[row].options.compiled_grammar == SLOW_GRAMMAR]
        put = self._put
        encode_s = ENCODE_S * sum(job.grid[0] * (job.end_part - job.first_part) / m.NUM_PARTS for job in step.encodes)
        return m.StepResult(
            incarnation=step.incarnation,
            step_id=step.step_id,
            rows=put(np.array(sampled, np.int32)),
            generations=put(np.array([self.rows[row].generation for row in sampled], np.uint32)),
            ids=put(np.array(sampled_ids, np.int32)),
            finishes=put(np.array(finishes, np.uint8)),
            compute_s=0.001 + self._token_s * (len(written) // len(self.groups)) + self.copy_s * num_copies + encode_s,
            wait_s=0.0,
            copy_s=self.copy_s * num_copies,
            token_outputs=put(np.frombuffer(b"".join(token_outputs), np.uint8)),
            prompt_logprobs=put(np.frombuffer(b"".join(prompt_logprobs), np.uint8)),
            errors=errors,
            num_ids=put(np.array(num_ids, np.int32)) if any(num_drafts_of) else b"",
            num_drafts=put(np.array(num_drafts_of, np.int32)) if any(num_drafts_of) else b"",
            slow_rows=slow,
            slow_s=[SLOW_S] * len(slow),
            encode_s=encode_s,
        )

    def _sample(self, row: int, length: int, proposed: list[int]) -> tuple[list[int], Finish, str]:
        """Append the ids after the first `length` of a row that equal the proposed ones, and one more. Returns them,
        and how they end the row."""
        state = self.rows[row]
        kept: list[int] = []
        for token_id in [*proposed, None] if not state.dead else ():
            context = [state.ids[position] + state.has_read_wrong for position in range(length + len(kept))]
            sampled_id = next_id(context, state.options.seed, state.index)
            if sampled_id in state.options.bias_ids:
                if kept:
                    break  # the next step finds it
                state.dead = True
                return [], Finish.ERROR, f"{sampled_id} must not be sampled"
            state.ids[length + len(kept)] = sampled_id
            kept.append(sampled_id)
            if sampled_id in state.options.stop_token_ids:
                state.dead = True
                return kept, Finish.STOP, ""
            if sampled_id != token_id:
                break
        return kept, Finish.NONE, ""

    def _propose(self, state: _Row, length: int, most: int) -> list[int]:
        """Ids that may follow the first `length` of a row. Some are wrong, so that slots get KV of wrong ids."""
        known = [state.ids[position] for position in range(length)] if most else []
        proposed: list[int] = []
        for position in range(most):
            right = next_id(known + proposed, state.options.seed, state.index)
            luck = random.Random(f"{length}/{position}/{right}").random()
            if luck > 0.97:
                break
            proposed.append(right if luck < self.skill else (right + 1) % VOCAB)
        return proposed
