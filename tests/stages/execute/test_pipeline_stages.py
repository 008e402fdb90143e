"""Pipeline parallelism: stages compute the same numbers, bit by bit, as one process."""

from pathlib import Path

import pytest

from tests.stages.execute import checkpoints
from tests.stages.execute.native_driver import ISAS, write
from tests.stages.execute.test_ranks import UNEVEN, compare


@pytest.mark.parametrize(("num_stages", "num_ranks"), [(2, 1), (3, 1), (2, 2)])
def test_logits(tmp_path: Path, num_stages: int, num_ranks: int) -> None:
    write(tmp_path, checkpoints.config_of(**UNEVEN))
    compare(tmp_path, ISAS[0], num_ranks, num_stages, kv_mib=2)
