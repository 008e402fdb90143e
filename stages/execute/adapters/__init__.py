"""LoRA adapters in the executor."""
