"""What the settings leave open, for each device."""

from pathlib import Path

import pytest

from pipeline.config.by_device import CPU_KV_BYTES, kv_bytes_in_ram, max_steps_in_flight
from pipeline.config.load import ConfigError, load

GPU = "execute.device=cuda"


def test_depth_follows_the_device_unless_it_is_said() -> None:
    assert max_steps_in_flight(load()) == 1
    assert max_steps_in_flight(load(sets=[GPU])) == 2
    for sets in ([], [GPU]):
        assert [
            max_steps_in_flight(load(sets=[*sets, f"schedule.max_steps_in_flight={depth}"]))
            for depth in (1, 2, 3, 4, "auto")
        ] == [
            *(1, 2, 3, 4),
            "auto",
        ]
        assert max_steps_in_flight(load(sets=[*sets, "schedule.max_steps_in_flight=0"])) == max_steps_in_flight(
            load(sets=sets)
        )


def test_kv_memory_of_a_gpu_takes_none_of_this_machine() -> None:
    assert kv_bytes_in_ram(load()) == CPU_KV_BYTES
    assert kv_bytes_in_ram(load(sets=["execute.kv_cache_bytes=1GiB"])) == 2**30
    assert kv_bytes_in_ram(load(sets=[GPU])) == kv_bytes_in_ram(load(sets=[GPU, "execute.kv_cache_bytes=1GiB"])) == 0


def test_the_defaults_that_are_shown_suit_a_gpu_too(tmp_path: Path) -> None:
    """Who changes one line of what `config show` prints has what suits the other device."""
    from pipeline.config.settings import Settings
    from pipeline.config.show import as_toml

    path = tmp_path / "mine.toml"
    path.write_text(as_toml(Settings()).replace('device = "cpu"', 'device = "cuda"'))
    assert load(path) == load(sets=[GPU])
    assert max_steps_in_flight(load(path)) == 2


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (
            [GPU, "execute.kernels=avx2"],
            "--set execute.kernels=avx2: execute.kernels: 'avx2' computes on a CPU, and execute.device is 'cuda': "
            "leave it at 'auto'",
        ),
        (
            [GPU, "execute.dtype=float32", "execute.kernels=torch"],
            "--set execute.kernels=torch: execute.kernels: 'torch' computes on a CPU, and execute.device is 'cuda': "
            "leave it at 'auto'",
        ),
        (
            ["quantization=int4"],
            "--set quantization=int4: quantization: 'int4' is made while the weights of a GPU are loaded, and "
            "execute.device is 'cpu': 'q8_0' and 'q4_1' are 8 and 4 bits there",
        ),
        (
            ["execute.gpu_memory_utilization=0"],
            "--set execute.gpu_memory_utilization=0: execute.gpu_memory_utilization: needs a number above 0 and at "
            "most 1, got the number 0",
        ),
        (
            ["execute.gpu_memory_utilization=1.01"],
            "--set execute.gpu_memory_utilization=1.01: execute.gpu_memory_utilization: needs a number above 0 and at "
            "most 1, got the number 1.01",
        ),
        (
            ["execute.device=gpu"],
            '--set execute.device=gpu: execute.device: needs "cpu" or "cuda", got the text "gpu"',
        ),
    ],
)
def test_what_a_device_can_not_do_is_told_at_start(sets: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(sets=sets)
    assert error.value.problems == [problem]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_formats_of_a_gpu_are_allowed_there(quantization: str) -> None:
    assert load(sets=[GPU, f"quantization={quantization}"]).quantization == quantization
