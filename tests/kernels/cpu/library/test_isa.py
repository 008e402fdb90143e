"""The instruction set is chosen from what the CPU and the system report, with the flags of real CPUs."""

import platform

import pytest

from pipeline.kernels.cpu import isa as cpu_isa
from pipeline.kernels.cpu.isa import Isa, available, identity, runnable

V2 = "fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt"
HASWELL = f"{V2} fma movbe aes xsave avx f16c rdrand abm bmi1 avx2 bmi2"
SKYLAKE_SP = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
CASCADE_LAKE = f"{SKYLAKE_SP} avx512_vnni"
ZEN_4 = f"{CASCADE_LAKE} avx512_bf16 avx512ifma avx512vbmi avx512_vbmi2 avx512_bitalg avx512_vpopcntdq"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_bf16 avx512_fp16 amx_tile amx_int8 avx_vnni"
KNIGHTS_LANDING = f"{HASWELL} avx512f avx512pf avx512er avx512cd"
SANDY_BRIDGE = f"{V2} aes xsave avx"


def cpuinfo(flags: str, name: str = "a CPU") -> str:
    """/proc/cpuinfo of a machine with two such CPUs."""
    one = (
        f"processor\t: 0\nmodel name\t: {name}\nflags\t\t: {flags}\nvmx flags\t: avx2 fma f16c\nbugs\t\t: spectre_v1\n"
    )
    return one + "\n" + one.replace("processor\t: 0", "processor\t: 1")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (SAPPHIRE_RAPIDS, ["amx", "avx512_bf16", "avx512", "avx2", "portable"]),
        (ZEN_4, ["avx512_bf16", "avx512", "avx2", "portable"]),
        (CASCADE_LAKE, ["avx512", "avx2", "portable"]),
        (SKYLAKE_SP, ["avx2", "portable"]),
        (KNIGHTS_LANDING, ["avx2", "portable"]),
        (HASWELL, ["avx2", "portable"]),
        (SANDY_BRIDGE, ["portable"]),
        (V2, ["portable"]),
        ("", ["portable"]),
    ],
    ids=[
        "sapphire rapids",
        "zen 4",
        "cascade lake",
        "skylake",
        "knights landing",
        "haswell",
        "sandy bridge",
        "v2",
        "none",
    ],
)
def test_a_known_cpu_lists_its_instruction_sets_best_first(flags: str, expected: list[Isa]) -> None:
    assert runnable("x86_64", cpuinfo(flags)) == expected


@pytest.mark.parametrize(
    ("vendor", "flags", "best"),
    [
        ("GenuineIntel", f"{ZEN_4} avx_vnni", "avx512"),
        ("GenuineIntel", SAPPHIRE_RAPIDS, "amx"),
        ("GenuineIntel", ZEN_4, "avx512_bf16"),
        ("AuthenticAMD", f"{ZEN_4} avx_vnni", "avx512_bf16"),
    ],
    ids=["sapphire rapids without amx", "sapphire rapids", "cooper lake", "zen 5"],
)
def test_dot_products_of_bfloat16_come_second_where_they_are_slow(vendor: str, flags: str, best: Isa) -> None:
    isas = runnable("x86_64", f"vendor_id\t: {vendor}\n{cpuinfo(flags)}")
    assert isas[0] == best
    assert set(isas) == {isa for isa, needed in cpu_isa.NEEDED.items() if needed <= set(flags.split())}


@pytest.mark.parametrize("flag", sorted(cpu_isa.NEEDED["amx"]))
def test_a_hidden_flag_excludes_the_instruction_sets_that_need_it(flag: str) -> None:
    hidden = " ".join(name for name in SAPPHIRE_RAPIDS.split() if name != flag)
    expected = [isa for isa in runnable("x86_64", cpuinfo(SAPPHIRE_RAPIDS)) if flag not in cpu_isa.NEEDED[isa]]
    assert runnable("x86_64", cpuinfo(hidden)) == expected


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp", ["neon", "portable"]),
        ("fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid", ["portable"]),
        ("fp asimd evtstrm crc32 asimdrdm asimddp", ["portable"]),
        ("", ["portable"]),
    ],
    ids=["neoverse n1", "cortex a72", "hidden atomics", "none"],
)
def test_an_arm_cpu_has_neon_with_dot_products_or_is_portable(features: str, expected: list[Isa]) -> None:
    assert runnable("aarch64", f"processor\t: 0\nFeatures\t: {features}\nCPU part\t: 0xd0c\n") == expected


@pytest.mark.parametrize("machine", ["aarch64", "riscv64", "ppc64le", "i686"])
def test_every_other_machine_is_portable(machine: str) -> None:
    assert runnable(machine, cpuinfo(ZEN_4)) == ["portable"]


def test_a_system_without_cpuinfo_is_portable() -> None:
    assert runnable("x86_64", "") == ["portable"]


def test_this_machine_lists_portable_last() -> None:
    assert available()[-1] == "portable"
    assert available({}) == runnable(platform.machine(), cpu_isa.cpuinfo())


@pytest.mark.parametrize("max_isa", runnable("x86_64", cpuinfo(SAPPHIRE_RAPIDS)))
def test_the_environment_limits_the_instruction_set(max_isa: cpu_isa.Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu_isa, "cpuinfo", lambda: cpuinfo(SAPPHIRE_RAPIDS))
    found = available({cpu_isa.MAX_ISA: max_isa})
    assert found[0] == max_isa and found[-1] == "portable"


def test_a_limit_above_the_cpu_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu_isa, "cpuinfo", lambda: cpuinfo(CASCADE_LAKE))
    assert available({cpu_isa.MAX_ISA: "avx512_bf16"})[0] == "avx512"


def test_an_unknown_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"PIPELINE_MAX_ISA is 'sse2'; it must be one of amx, avx512_bf16, avx512"):
        available({cpu_isa.MAX_ISA: "sse2"})


def test_equal_cpus_have_the_same_identity_and_others_differ() -> None:
    assert identity("x86_64", cpuinfo(ZEN_4)) == identity(
        "x86_64", cpuinfo(ZEN_4).replace("processor\t: 0", "processor : 7")
    )
    kinds = {
        identity("x86_64", cpuinfo(ZEN_4)),
        identity("x86_64", cpuinfo(ZEN_4, "another CPU")),
        identity("x86_64", cpuinfo(CASCADE_LAKE)),
        identity("aarch64", "CPU part\t: 0xd40\nFeatures\t: fp asimd"),
        identity("aarch64", "CPU part\t: 0xd4f\nFeatures\t: fp asimd"),
        identity("aarch64", ""),
    }
    assert len(kinds) == 6
