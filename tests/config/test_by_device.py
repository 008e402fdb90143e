"""Defaults that depend on the device and on where it is."""

from pathlib import Path

import pytest

from pipeline.config.by_device import CPU_KV_BYTES, kv_bytes_in_ram, max_steps_in_flight
from pipeline.config.load import ConfigError, load

GPU = "execute.device=cuda"
FAR = "execute.launcher=ray"


def test_steps_in_flight_default_to_the_device_s_value() -> None:
    assert max_steps_in_flight(load()) == 1
    assert max_steps_in_flight(load(sets=[GPU])) == 2
    assert max_steps_in_flight(load(sets=[FAR])) == 2
    for sets in ([], [GPU], [FAR]):
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


def test_a_pipeline_has_a_step_for_each_stage() -> None:
    three = "execute.pipeline_parallel=3"
    for depth in (0, '"auto"', 3):
        assert max_steps_in_flight(load(sets=[three, f"schedule.max_steps_in_flight={depth}"])) == 3
    assert max_steps_in_flight(load(sets=[three, "schedule.max_steps_in_flight=4"])) == 4


def test_kv_memory_of_a_gpu_takes_no_host_memory() -> None:
    assert kv_bytes_in_ram(load()) == CPU_KV_BYTES
    assert kv_bytes_in_ram(load(sets=["execute.kv_cache_bytes=1GiB"])) == 2**30
    assert kv_bytes_in_ram(load(sets=[GPU])) == kv_bytes_in_ram(load(sets=[GPU, "execute.kv_cache_bytes=1GiB"])) == 0


def test_shown_defaults_suit_a_gpu_too(tmp_path: Path) -> None:
    """Changing only `device` in the output of `config show` gives the other device's defaults."""
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
def test_options_that_a_device_lacks_are_errors(sets: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(sets=sets)
    assert error.value.problems == [problem]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_gpu_formats_are_allowed_on_a_gpu(quantization: str) -> None:
    assert load(sets=[GPU, f"quantization={quantization}"]).quantization == quantization
