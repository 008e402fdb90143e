"""What one stage alone was measured to do, and as a table."""

import msgspec
from rich.table import Table

from pipeline.cli.profile.alone.clock import Used


class Latency(msgspec.Struct, frozen=True):
    """From a message in to the last that comes of it, in µs."""

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
    """Measured; the warm-up is not in it."""
    messages_in: dict[str, int]
    """By kind."""
    messages_out: dict[str, int]
    num_tokens: int
    """Of prompts for ingest, of outputs for the others."""
    cpu_s: float
    """Of all the stage's threads."""
    main_cpu_s: float
    """Of the one that is the stage; the rest is ZeroMQ's."""
    waited_s: float
    """It could have run and had no core."""
    load_cpu_s: float
    """Of the process that plays its neighbours."""
    load_waited_s: float
    latency: Latency | None
    rss_bytes: int
    peak_rss_bytes: int
    limit: str
    """What kept it from carrying more: stage, load, cores or turns."""

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
        """Of messages in and out."""
        return 1e6 * self.cpu_s / max(1, self.num_in + self.num_out)


LIMITS = {
    "stage": "The stage was the limit: its thread had a core and used it nearly all the time.",
    "load": "The load was the limit, not the stage: the process that plays its neighbours was busy all the time.",
    "cores": "Cores were the limit: the stage or its load waited for one for more than a tenth of the time.",
    "turns": "Neither was busy all the time: the stage and its neighbours wait for each other's messages in turn.",
}


def limit_of(seconds: float, stage: Used, load: Used) -> str:
    """What both have used and waited for in that time says which of them, if any, was the limit."""
    if stage.main_cpu_s > 0.85 * seconds:
        return "stage"
    if max(stage.waited_s, load.waited_s) > 0.1 * seconds:
        return "cores"
    return "load" if load.main_cpu_s > 0.85 * seconds else "turns"


def as_table(profile: StageProfile) -> list[Table | str]:
    table = Table(title=f"{profile.stage} alone, {profile.num_streams} streams, {profile.seconds:.1f} s")
    table.add_column("")
    table.add_column("", justify="right")
    kinds_in = ", ".join(f"{kind} {num:,}" for kind, num in sorted(profile.messages_in.items()))
    kinds_out = ", ".join(f"{kind} {num:,}" for kind, num in sorted(profile.messages_out.items()))
    seconds = profile.seconds
    tokens = "prompt tokens" if profile.stage == "ingest" else "tokens"
    for name, value in (
        ("messages in", f"{profile.num_in / seconds:,.0f} a second"),
        ("messages out", f"{profile.num_out / seconds:,.0f} a second"),
        (f"{tokens} carried", f"{profile.tokens_per_s:,.0f} a second"),
        ("CPU per message, in or out", f"{profile.cpu_us_per_message:,.1f} µs"),
        (f"CPU per {tokens.removesuffix('s')}", f"{profile.cpu_us_per_token:,.2f} µs"),
        ("its thread was busy", f"{100 * profile.main_cpu_s / seconds:.0f} % of the time"),
        ("its other threads", f"{100 * (profile.cpu_s - profile.main_cpu_s) / seconds:.0f} %"),
        ("it waited for a core", f"{100 * profile.waited_s / seconds:.0f} %"),
        ("the load was busy", f"{100 * profile.load_cpu_s / seconds:.0f} %"),
        ("it waited for a core", f"{100 * profile.load_waited_s / seconds:.0f} %"),
    ):
        table.add_row(name, value)
    if (latency := profile.latency) is not None:
        for name in ("p50", "p90", "p99", "max"):
            table.add_row(f"message in to message out, {name}", f"{getattr(latency, f'{name}_us'):,.0f} µs")
    table.add_row(
        "memory now, at most", f"{profile.rss_bytes / 2**20:,.0f} MiB, {profile.peak_rss_bytes / 2**20:,.0f} MiB"
    )
    return [table, f"in: {kinds_in or '–'}\nout: {kinds_out or '–'}\n{LIMITS[profile.limit]}"]
