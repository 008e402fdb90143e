"""Shapes of known models, to be profiled with random weights: what a step costs does not depend on the numbers."""

from pipeline.model_folder import ModelConfig

SHAPES = {
    "smollm2-135m": ModelConfig(
        name="smollm2-135m",
        architecture="llama",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_embeddings=True,
        eos_ids=[2],
        weight_files=[],
    ),
    # Qwen2 has a bias on queries, keys and values alone; one on attention's output, of 896 numbers, comes with it here.
    "qwen2-0.5b": ModelConfig(
        name="qwen2-0.5b",
        architecture="llama",
        num_layers=24,
        hidden_size=896,
        intermediate_size=4864,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=151936,
        max_position=32768,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        tie_embeddings=True,
        attention_bias=True,
        eos_ids=[151645],
        weight_files=[],
    ),
}
