"""LoRA adapters (Hu et al., 2021, arXiv:2106.09685): reading PEFT's folders, and prepared files."""
