"""Make the ids that the executor's tests compare with, by transformers in float32 over prepared weights.

    python tools/make_reference.py MODEL_DIR tests/data/smollm2_reference.json

MODEL_DIR is a folder that prepare has left: model.json, tokenizer.json, safetensors. The reference holds, for each of
the prompts below, its ids and the greedy ids that follow (end-of-sequence ids do not end them), and for each of the
texts its ids and the arg-max of the logits at every position.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.model_folder import ModelConfig
from pipeline.stages.execute.weights import Weights

NUM_OUTPUTS = 48

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

CHAT_PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain why the sky is blue to a child of six.",
    "List five fruits that are red, one a line.",
    "Translate 'good morning, my friend' into Spanish.",
    "I have 17 apples, give away 5 and buy 9 more. How many do I have? Think step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarize in one sentence: The mitochondrion is an organelle found in most cells, in which respiration and the "
    "production of energy take place.",
    "Give me a recipe for pancakes.",
    "What's the difference between a process and a thread?",
    "Suggest three names for a cat that likes to sleep in boxes, and say why each would fit.",
    "Fix the grammar: 'him and me was going to the store when it start raining'",
]

PLAIN_PROMPTS = [
    "The quick brown fox",
    "Once upon a time, in a village at the foot of a mountain, there lived",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n",
    "Water boils at 100 degrees Celsius at sea level because",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "# Installation\n\nFirst, clone the repository and create a virtual environment:\n\n```bash\n",
    "In 1687 Isaac Newton published the Philosophiae Naturalis Principia Mathematica, in which he",
]

TEXTS = [
    # Lewis Carroll, Alice's Adventures in Wonderland, 1865.
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, “and "
    "what is the use of a book,” thought Alice “without pictures or conversations?”\n\nSo she was considering in her "
    "own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of "
    "making a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White "
    "Rabbit with pink eyes ran close by her.",
    # Herman Melville, Moby-Dick, 1851.
    "Call me Ishmael. Some years ago—never mind how long precisely—having little or no money in my purse, and nothing "
    "particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. "
    "It is a way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim "
    "about the mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily "
    "pausing before coffin warehouses, and bringing up the rear of every funeral I meet; then, I account it high time "
    "to get to sea as soon as I can.",
    # Charles Darwin, On the Origin of Species, 1859.
    "When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the distribution of the "
    "inhabitants of South America, and in the geological relations of the present to the past inhabitants of that "
    "continent. These facts seemed to me to throw some light on the origin of species—that mystery of mysteries, as "
    "it has been called by one of our greatest philosophers. On my return home, it occurred to me, in 1837, that "
    "something might perhaps be made out on this question by patiently accumulating and reflecting on all sorts of "
    "facts which could possibly have any bearing on it.",
    # Written for this file.
    "A server for language models spends its life on two kinds of work. When a request arrives, all of its tokens are "
    "known, and they can be computed together: the processor multiplies large matrices and is busy. After that every "
    "step yields one token, and the next can't begin before it is there: now the processor mostly waits for memory. "
    "Batching helps because the weights are read once for everyone. The art lies in mixing both kinds, so that those "
    "who wait for their first word don't stop those who are reading already.\n\n## Usage\n\n```python\nfrom server "
    'import Client\n\nclient = Client("http://127.0.0.1:8000")\nfor word in client.stream("Tell me a story"):\n'
    '    print(word, end="")\n```\n',
]


def load(folder: Path) -> LlamaForCausalLM:
    """The model of a prepared folder in transformers' own code, float32."""
    config = ModelConfig.load(folder)
    assert config.architecture == "llama" and config.rope_scaling is None
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )
    )
    weights = Weights(folder, config, torch.float32)
    with torch.no_grad():
        # A tied head is the embedding, which is among the parameters by that name.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(weights.vector(name, len(parameter)))
            else:
                parameter.copy_(weights.matrix(name, *parameter.shape).dequantize(torch.float32))
    return model.float().eval()


def chat(text: str) -> str:
    """A conversation's first turn, as SmolLM2's chat template puts it."""
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, ids: list[int]) -> list[int]:
    """The greedy ids after `ids`, computed with transformers' cache."""
    output: list[int] = []
    step = model(torch.tensor([ids]), use_cache=True)
    while True:
        output.append(int(step.logits[0, -1].argmax()))
        if len(output) == NUM_OUTPUTS:
            return output
        step = model(torch.tensor([output[-1:]]), past_key_values=step.past_key_values, use_cache=True)


@torch.inference_mode()
def teacher_forced(model: LlamaForCausalLM, ids: list[int]) -> list[int]:
    """The arg-max at every position of a text."""
    result: list[int] = model(torch.tensor([ids])).logits[0].argmax(dim=-1).tolist()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    model = load(args.model_dir)
    tokenizer = Tokenizer.from_file(str(args.model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in [*map(chat, CHAT_PROMPTS), *PLAIN_PROMPTS]]
    texts = [tokenizer.encode(text).ids for text in TEXTS]
    reference = {
        "prompts": [{"ids": ids, "output_ids": greedy(model, ids)} for ids in prompts],
        "texts": [{"ids": ids, "argmax_ids": teacher_forced(model, ids)} for ids in texts],
    }
    # An entry a line, so that a change of the reference is a diff to read.
    entries = json.dumps(reference, separators=(",", ":")).replace("},{", "},\n{").replace('],"texts"', '],\n"texts"')
    args.output.write_text(entries + "\n")
    print(
        f"{len(prompts)} prompts of {sum(map(len, prompts))} tokens, {len(texts)} texts of {sum(map(len, texts))} "
        f"tokens, in {time.monotonic() - began:.0f} s: {args.output}"
    )


if __name__ == "__main__":
    main()
