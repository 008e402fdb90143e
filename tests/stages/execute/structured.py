"""Rows with grammars, driven by hand until each has ended."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.settings import Settings
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import make_step, row_add, settings, take
from tests.stages.ingest.models import byte_tokenizer

EOS = 257
"""</s>; the model has further ids that the tokenizer does not have."""

BLOCKS_PER_ROW = 12

TOKENIZER = byte_tokenizer()


def write(folder: Path, **changes: Any) -> Path:
    """A random model that writes bytes."""
    checkpoints.write(folder, checkpoints.config_of(**{"eos_ids": [EOS], **changes}))
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def text_of(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))


@dataclass
class Seq:
    """A sequence: how it is sampled, its output, and how it ended."""

    options: m.GenerationOptions
    prompt: list[int] = field(default_factory=lambda: ids_of("say: "))
    index: int = 0
    output: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    error: str = ""
    row: int = -1
    num_computed: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def text(self) -> str:
        """The text without the id that ended it."""
        return text_of([token for token in self.output if token != EOS])


class Structured:
    """Runs sequences in one batch, as a scheduler does."""

    def __init__(self, folder: Path, config: Settings | None = None, **how: Any) -> None:
        self.runner = CpuRunner(config or settings(**how), folder)
        self.seqs: list[Seq] = []

    def add(self, *seqs: Seq, fork_of: Seq | None = None) -> m.Step:
        """A step that adds the sequences, and computes nothing yet."""
        adds = []
        for seq in seqs:
            seq.row = next(row for row in range(8) if row not in [one.row for one in self.seqs])
            seq.num_computed = 0
            blocks = list(range(seq.row * BLOCKS_PER_ROW, (seq.row + 1) * BLOCKS_PER_ROW))
            ids = seq.ids if fork_of is None else seq.output
            other = -1 if fork_of is None else fork_of.row
            adds.append(
                row_add(seq.row, ids, blocks, seq.options, index=seq.index, fork_of=other, num_prompt=len(seq.prompt))
            )
            self.seqs.append(seq)
        step = make_step(adds=adds)
        self.runner.step(step, take)
        return step

    def drop(self, seq: Seq) -> None:
        self.seqs.remove(seq)
        self.runner.step(make_step(drops=[seq.row]), take)
        seq.row = -1

    def step(self) -> None:
        """One more id for each sequence that has not ended."""
        live = [seq for seq in self.seqs if not seq.finish]
        entries = [(seq.row, seq.num_computed, len(seq.ids) - seq.num_computed, True) for seq in live]
        sampled = self.runner.step(make_step(entries), take)
        errors = list(sampled.errors)
        for seq, token, finish in zip(live, sampled.ids.tolist(), sampled.finishes.tolist(), strict=True):
            seq.num_computed = len(seq.ids)
            seq.finish = Finish(finish)
            if seq.finish is Finish.ERROR:
                seq.error = errors.pop(0)
                assert token == -1
            else:
                seq.output.append(token)
        assert not errors

    def run(self, *seqs: Seq, max_tokens: int = 60) -> None:
        """Runs until all have ended, by themselves or by length."""
        self.add(*seqs)
        self.finish(max_tokens)

    def finish(self, max_tokens: int = 60) -> None:
        while any(not seq.finish for seq in self.seqs):
            self.step()
            for seq in self.seqs:
                if not seq.finish and len(seq.output) >= max_tokens:
                    seq.finish = Finish.LENGTH
        for seq in list(self.seqs):
            self.drop(seq)

    def __enter__(self) -> "Structured":
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()


def lark(pattern: str) -> str:
    return f"start: /{pattern}/"


def options(grammar: str = "", **how: Any) -> m.GenerationOptions:
    return m.GenerationOptions(**{"temperature": 1.0, "seed": 5, "compiled_grammar": grammar, **how})


def largest_id(seq: Seq) -> int:
    return int(np.max(seq.output))


assert BLOCKS_PER_ROW * BLOCK_SIZE >= 100
