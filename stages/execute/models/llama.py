"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3.

They have the same layers. Their differences (biases, query and key norms, windows, rotary embedding, tied head) are
fields of `ModelConfig`; the code never checks a model's name.

embedding → layers × (norm → attention → + → norm → feed-forward → +) → norm → logits of the sampled tokens
"""

from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.cpu.program import ProgramBuilder
from pipeline.stages.execute.layers.attention import attention_weights
from pipeline.stages.execute.layers.mlp import mlp_weights
from pipeline.stages.execute.weights import Weights


def build(config: ModelConfig, weights: Weights, program: ProgramBuilder) -> None:
    """Record the forward pass of a model. Raises UserError if a tensor is missing or has the wrong shape."""
    hidden, vocab_size = config.hidden_size, config.vocab_size
    embedding = weights.matrix("model.embed_tokens.weight", vocab_size, hidden)
    program.embed(embedding)
    for i in range(config.num_layers):
        program.attention(attention_weights(config, weights, i))
        program.mlp(mlp_weights(config, weights, i))
    head = embedding if config.tie_embeddings else weights.matrix("lm_head.weight", vocab_size, hidden)
    program.sample(weights.vector("model.norm.weight", hidden), head)
