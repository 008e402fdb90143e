"""The result of measuring one stage alone, as numbers and as a table."""

import msgspec
from rich.table import Table

from pipeline.cli.profile.alone.clock import ProcessTimes


class Latency(msgspec.Struct, frozen=True):
    """From a message to the last message that results from it, in µs."""

    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float
    num: int


class StageProfile(msgspec.Struct, frozen=True):
    version: str
    stage: str
    model: str
    num_streams: int
    seconds: float
    """Measured time, without the warm-up."""
    messages_in: dict[str, int]
    """By type of message."""
    messages_out: dict[str, int]
    num_tokens: int
    """Prompt tokens for ingest, output tokens for the others."""
    cpu_s: float
    """CPU time of all the stage's threads."""
    main_cpu_s: float
    """CPU time of the stage's main thread; the rest belongs to ZeroMQ."""
    waited_s: float
    """Time in which it was runnable but had no core."""
    load_cpu_s: float
    """CPU time of the process that fakes its neighbours."""
    load_waited_s: float
    latency: Latency | None
    rss_bytes: int
    peak_rss_bytes: int
    limit: str
    """The bottleneck: stage, load, cores or turns."""

    @property
    def num_in(self) -> int:
        return sum(self.messages_in.values())

    @property
    def num_out(self) -> int:
        return sum(self.messages_out.values())

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self.cpu_s / max(1, self.num_tokens)

    @property
    def cpu_us_per_message(self) -> float:
        """Per message, in and out."""
        return 1e6 * self.cpu_s / max(1, self.num_in + self.num_out)


LIMITS = {
    "stage": "The stage was the bottleneck: its main thread was busy nearly all the time.",
    "load": "The load was the bottleneck, not the stage: the process that fakes its neighbours was busy all the time.",
    "cores": "Cores were the bottleneck: the stage or its load waited for one for more than a tenth of the time.",
    "turns": "There was no bottleneck: the stage and its neighbours waited for each other's messages in turn.",
}


def limit_of(seconds: float, stage: ProcessTimes, load: ProcessTimes) -> str:
    """Determine the bottleneck from the CPU and waiting times of both processes."""
    if stage.main_cpu_s > 0.85 * seconds:
        return "stage"
    if max(stage.waited_s, load.waited_s) > 0.1 * seconds:
        return "cores"
    return "load" if load.main_cpu_s > 0.85 * seconds else "turns"


def as_table(profile: StageProfile) -> list[Table | str]:
    table = Table(title=f"{profile.stage} alone, {profile.num_streams} streams, {profile.seconds:.1f} s")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    kinds_in = ", ".join(f"{kind} {num:,}" for kind, num in sorted(profile.messages_in.items()))
    kinds_out = ", ".join(f"{kind} {num:,}" for kind, num in sorted(profile.messages_out.items()))
    seconds = profile.seconds
    tokens = "prompt tokens" if profile.stage == "ingest" else "tokens"
    for name, value in (
        ("messages in", f"{profile.num_in / seconds:,.0f} per second"),
        ("messages out", f"{profile.num_out / seconds:,.0f} per second"),
        (f"{tokens} carried", f"{profile.tokens_per_s:,.0f} per second"),
        ("CPU per message, in or out", f"{profile.cpu_us_per_message:,.1f} µs"),
        (f"CPU per {tokens.removesuffix('s')}", f"{profile.cpu_us_per_token:,.2f} µs"),
        ("main thread busy", f"{100 * profile.main_cpu_s / seconds:.0f} % of the time"),
        ("other threads", f"{100 * (profile.cpu_s - profile.main_cpu_s) / seconds:.0f} %"),
        ("waiting for a core", f"{100 * profile.waited_s / seconds:.0f} %"),
        ("load busy", f"{100 * profile.load_cpu_s / seconds:.0f} %"),
        ("load waiting for a core", f"{100 * profile.load_waited_s / seconds:.0f} %"),
    ):
        table.add_row(name, value)
    if (latency := profile.latency) is not None:
        for name in ("p50", "p90", "p99", "max"):
            table.add_row(f"message in to message out, {name}", f"{getattr(latency, f'{name}_us'):,.0f} µs")
    table.add_row(
        "memory now, peak", f"{profile.rss_bytes / 2**20:,.0f} MiB, {profile.peak_rss_bytes / 2**20:,.0f} MiB"
    )
    return [table, f"in: {kinds_in or '–'}\nout: {kinds_out or '–'}\n{LIMITS[profile.limit]}"]
