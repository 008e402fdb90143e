"""`LLM(tensor_parallel=…, pipeline_parallel=…)`"""

import pytest

from pipeline.client.embedded.server import settings_of, with_ranks
from pipeline.errors import UserError


def test_the_arguments_are_settings_of_execute() -> None:
    given = {"execute": {"num_threads": 3}, "max_model_len": 99}
    settings = settings_of("LLM", None, with_ranks(given, tensor_parallel=2, pipeline_parallel=3))
    assert (settings.execute.tensor_parallel, settings.execute.pipeline_parallel) == (2, 3)
    assert (settings.execute.num_threads, settings.max_model_len, settings.execute.num_ranks) == (3, 99, 6)
    assert with_ranks(given, tensor_parallel=None, pipeline_parallel=None) == given


def test_two_numbers_of_stages_are_an_error() -> None:
    with pytest.raises(UserError, match=r"^pipeline_parallel: is 2, but execute\.pipeline_parallel is 3$"):
        with_ranks({"execute": {"pipeline_parallel": 3}}, pipeline_parallel=2)
