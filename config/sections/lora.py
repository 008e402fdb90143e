"""Settings of LoRA adapters: docs/lora.md."""

from typing import Annotated

from msgspec import Meta, field

from pipeline.config.sections.base import Frozen


class LoraSettings(Frozen, frozen=True):
    """LoRA adapters: small changes of the model that requests choose by name."""

    adapters: Annotated[
        dict[str, str],
        Meta(
            description="Adapters that are loaded at the start: names for clients, and folders in PEFT's format or "
            '.gguf files, as in {sql = "/models/sql-lora"}.'
        ),
    ] = field(default_factory=dict)
    runtime_loading: Annotated[
        bool,
        Meta(
            description="Let clients with an API key load and unload adapters with POST /v1/load_lora_adapter and "
            "/v1/unload_lora_adapter, from folders of this machine. On a server without keys, any client may."
        ),
    ] = False
    max_loras: Annotated[
        int,
        Meta(ge=1, le=256, description="Maximum number of adapters among the running sequences. Others wait."),
    ] = 8
    max_lora_rank: Annotated[int, Meta(ge=1, le=512, description="Maximum rank of an adapter.")] = 64
    max_cpu_loras: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Adapters that execute keeps in memory, those of running sequences included; further ones are "
            "read from their files again. 0: twice lora.max_loras.",
        ),
    ] = 0

    max_adapter_bytes: Annotated[
        int,
        Meta(
            ge=1,
            le=2**40,
            description="Largest file of weights of an adapter. It is read into memory while the adapter is loaded.",
        ),
    ] = 4 * 1024**3
    allowed_folders: Annotated[
        list[str],
        Meta(
            description="With lora.runtime_loading: the only folders, with all below them, that clients may load "
            "adapters from. Empty: any folder that the server can read; then errors don't tell what is not an adapter "
            "from what does not exist."
        ),
    ] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Whether requests may use adapters."""
        return bool(self.adapters) or self.runtime_loading

    @property
    def num_slots(self) -> int:
        """Adapters that execute keeps in memory."""
        return max(self.max_cpu_loras or 2 * self.max_loras, self.max_loras)
