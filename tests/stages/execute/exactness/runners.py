"""Runners of tiny models, and the texts that their sequences have alone: tests compare them with those of schedules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from pipeline.runtime.model.kv_groups import KVGroup
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute import tiny_architectures
from tests.stages.execute.pair import Pair, Request, make_runner

FEW_TOKENS = 24
"""Of a step, with little memory: a long chunk needs many blocks."""


class Runners:
    """Each is loaded once; blocks and slots contain what earlier tests wrote."""

    def __init__(self) -> None:
        self._made: dict[Any, CpuRunner] = {}
        self._texts: dict[Any, list[list[list[int]]]] = {}

    def made(self, key: Any, make: Callable[[], CpuRunner]) -> CpuRunner:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def alone(self, runner: CpuRunner, requests: list[Request]) -> list[list[list[int]]]:
        """The texts, one sequence after the other, each prompt in one chunk, without a prefix cache."""
        key = id(runner), requests[0].n, requests[0].fields
        if key not in self._texts:
            self._texts[key] = Pair(runner, prefix_caching=False, max_num_seqs=1).run(requests)
        return self._texts[key]

    @contextmanager
    def closing(self) -> Iterator[Self]:
        try:
            yield self
        finally:
            for runner in self._made.values():
                runner.close()


class GroupRunners(Runners):
    """Runners of a model with KV groups, by memory and type of the KV cache, with and without these groups."""

    def __init__(
        self,
        folder: Path,
        variant: str,
        groups: Sequence[KVGroup],
        few: int,
        unit_bytes: Callable[[str, bool], int],
    ) -> None:
        """`few`: blocks of one group with which a step has `FEW_TOKENS`. `unit_bytes`: bytes of a block of one group,
        or of all layers, by the type of the KV cache and whether there are groups."""
        super().__init__()
        self._folder, _ = tiny_architectures.write(folder, tiny_architectures.VARIANTS[variant])
        self._groups = tuple(groups)
        self._few = few
        self._unit_bytes = unit_bytes

    def get(
        self, num_blocks: int, num_swap_blocks: int = 0, kv_dtype: str = "auto", *, has_groups: bool = True
    ) -> CpuRunner:
        def make() -> CpuRunner:
            how: dict[str, Any] = {
                "kv_dtype": kv_dtype,
                "hybrid_kv_cache_manager": has_groups,
                "num_swap_blocks": num_swap_blocks,
                "tokens": FEW_TOKENS if num_blocks == self._few else 0,
            }
            runner = make_runner(self._folder, self._unit_bytes(kv_dtype, has_groups), num_blocks, **how)
            assert isinstance(runner.program, NativeProgram)
            whole = (KVGroup(0, sum(group.num_layers for group in self._groups)),)
            assert tuple(runner.facts.kv_groups) == (self._groups if has_groups else whole)
            return runner

        return self.made((num_blocks, num_swap_blocks, kv_dtype, has_groups), make)

    def expected(self, requests: list[Request], kv_dtype: str = "auto") -> list[list[list[int]]]:
        """The texts of each sequence alone, without groups."""
        return self.alone(self.get(60, kv_dtype=kv_dtype, has_groups=False), requests)
