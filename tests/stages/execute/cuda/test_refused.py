"""Out-of-memory on a GPU is a clear error."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.errors import UserError
from pipeline.stages.execute import stage
from pipeline.stages.execute.cuda import runner
from pipeline.stages.execute.cuda.memory import require_row_memory
from tests.stages.execute.cuda.conftest import on_device


def test_more_rows_than_an_index_can_address_are_a_clear_error() -> None:
    require_row_memory(4096, 131072, 129)
    with pytest.raises(
        UserError, match=r"schedule\.max_num_seqs is 4096, but the limit on a GPU is 19\d\d sequences of 1048576 tokens"
    ):
        require_row_memory(4096, 1048576, 129)


def test_running_out_of_memory_while_loading_is_a_clear_error(
    slight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB"
        )

    monkeypatch.setattr(runner, "CudaRunner", full)
    launch: Any = SimpleNamespace(settings=on_device(), model_dir=str(slight_dir), rank=0, ranks_fd=-1, stages_fd=-1)
    with pytest.raises(UserError, match=r"its steps \(CUDA out of memory\): lower schedule\.max_num_batched_tokens"):
        stage._load(launch, None, print)
