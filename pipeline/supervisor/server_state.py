"""What the parts of the supervisor know about the server as a whole."""

from pipeline.runtime import messages as m


class ServerState:
    """The loop's parts read it; each field says who changes it."""

    def __init__(self) -> None:
        self.prepared: m.Prepared | None = None
        """The model on this host. Set by the loop, when prepare reports it."""
        self.facts: m.ExecuteFacts | None = None
        """Of the executor, from all of its ranks that are ready. Set by the loop."""
        self.first_health: m.Health | None = None
        """Set by the loop: the first answers of all stages."""
        self.is_serving = False
        """Set by the supervisor, as is `is_ending`."""
        self.is_ending = False
        self.keeps_sockets = False
        """The listening sockets stay open at the end, for the next server. Set by the supervisor."""
        self.reasons: dict[str, str] = {}
        """Why stages failed, in their own words: set by the loop, taken when they end."""
        self.problem = ""
        """Why the server can't start, if a stage has failed. Set by `StageDeaths` and the supervisor."""
        self.drained: set[str] = set()
        """Names of gateways whose streams have ended, because the server ends."""

    @property
    def name(self) -> str:
        """As `pipeline ps` shows it."""
        return "draining" if self.is_ending else "serving" if self.is_serving else "starting"

    @property
    def takes_changes(self) -> bool:
        """Whether stages can be restarted on purpose."""
        return self.is_serving and not self.is_ending
