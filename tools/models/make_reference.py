"""Make the ids that the executor's tests compare with, by transformers in float32 over prepared weights.

    python tools/models/make_reference.py MODEL_DIR tests/data/smollm2_reference.json

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

from pipeline.cli.out_file import write_output
from pipeline.kernels.matrix import as_matrix, as_tensor
from pipeline.runtime.model.model_config import ModelConfig
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
    # Jane Austen, Pride and Prejudice, 1813.
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife.\n\nHowever little known the feelings or views of such a man may be on his first entering a neighbourhood, "
    "this truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful "
    "property of some one or other of their daughters.\n\n“My dear Mr. Bennet,” said his lady to him one day, “have "
    "you heard that Netherfield Park is let at last?”\n\nMr. Bennet replied that he had not.\n\n“But it is,” returned "
    "she; “for Mrs. Long has just been here, and she told me all about it.”\n\nMr. Bennet made no answer.\n\n“Do not "
    "you want to know who has taken it?” cried his wife impatiently.\n\n“You want to tell me, and I have no objection "
    "to hearing it.”\n\nThis was invitation enough.",
    # Abraham Lincoln at Gettysburg, 1863.
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great "
    "battle-field of that war. We have come to dedicate a portion of that field, as a final resting place for those "
    "who here gave their lives that that nation might live. It is altogether fitting and proper that we should do "
    "this. But, in a larger sense, we can not dedicate—we can not consecrate—we can not hallow—this ground. The brave "
    "men, living and dead, who struggled here, have consecrated it, far above our poor power to add or detract.",
    # Charles Dickens, A Tale of Two Cities, 1859.
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to Heaven, we were all going direct the other way—in short, the period was so "
    "far like the present period, that some of its noisiest authorities insisted on its being received, for good or "
    "for evil, in the superlative degree of comparison only.",
    # Mary Shelley, Frankenstein, 1818.
    "It was on a dreary night of November that I beheld the accomplishment of my toils. With an anxiety that almost "
    "amounted to agony, I collected the instruments of life around me, that I might infuse a spark of being into the "
    "lifeless thing that lay at my feet. It was already one in the morning; the rain pattered dismally against the "
    "panes, and my candle was nearly burnt out, when, by the glimmer of the half-extinguished light, I saw the dull "
    "yellow eye of the creature open; it breathed hard, and a convulsive motion agitated its limbs.",
    # Arthur Conan Doyle, A Scandal in Bohemia, 1891.
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name. In his eyes "
    "she eclipses and predominates the whole of her sex. It was not that he felt any emotion akin to love for Irene "
    "Adler. All emotions, and that one particularly, were abhorrent to his cold, precise but admirably balanced mind. "
    "He was, I take it, the most perfect reasoning and observing machine that the world has seen, but as a lover he "
    "would have placed himself in a false position.",
    # H. G. Wells, The War of the Worlds, 1898.
    "No one would have believed in the last years of the nineteenth century that this world was being watched keenly "
    "and closely by intelligences greater than man’s and yet as mortal as his own; that as men busied themselves about "
    "their various concerns they were scrutinised and studied, perhaps almost as narrowly as a man with a microscope "
    "might scrutinise the transient creatures that swarm and multiply in a drop of water. With infinite complacency "
    "men went to and fro over this globe about their little affairs, serene in their assurance of their empire over "
    "matter.",
    # The Declaration of Independence, 1776.
    "When in the Course of human events, it becomes necessary for one people to dissolve the political bands which "
    "have connected them with another, and to assume among the powers of the earth, the separate and equal station to "
    "which the Laws of Nature and of Nature's God entitle them, a decent respect to the opinions of mankind requires "
    "that they should declare the causes which impel them to the separation.\n\nWe hold these truths to be "
    "self-evident, that all men are created equal, that they are endowed by their Creator with certain unalienable "
    "Rights, that "
    "among these are Life, Liberty and the pursuit of Happiness.",
    # Written for this file.
    "Photosynthesis is the process by which green plants, algae and some bacteria turn light into chemical energy. In "
    "the first stage, pigments such as chlorophyll absorb light and water is split, which sets oxygen free. In the "
    "second stage, known as the Calvin cycle, carbon dioxide from the air is built into sugars. The rate depends on "
    "the strength of the light, on temperature and on how much carbon dioxide there is. Because nearly all food "
    "chains begin with it, photosynthesis is often called the most important chemical process on Earth.\n\n1. Light is "
    "absorbed in the thylakoid membranes.\n2. ATP and NADPH are formed.\n3. The Calvin cycle uses both to make "
    "sugar.\n",
    "Question: A train leaves the station at 9:15 and travels 180 kilometres at 60 kilometres an hour. When does it "
    "arrive?\nAnswer: The journey takes 180 / 60 = 3 hours. Three hours after 9:15 it is 12:15, so the train arrives "
    "at 12:15.\n\nQuestion: A shop sells pencils at 3 for 1 dollar. How much do 24 pencils cost?\nAnswer: 24 pencils "
    "are 24 / 3 = 8 sets of three, and each set costs 1 dollar, so they cost 8 dollars.\n",
    'import sys\nfrom collections import Counter\n\n\ndef words(path):\n    """Yield the words of a file, in lower '
    'case."""\n    with open(path) as file:\n        for line in file:\n            for word in line.split():\n'
    '                yield word.lower()\n\n\ndef main():\n    if len(sys.argv) != 2:\n        print("usage: '
    'count.py FILE")\n        return 1\n    counts = Counter(words(sys.argv[1]))\n    for word, count in '
    'counts.most_common(10):\n        print(f"{count:6d} {word}")\n    return 0\n\n\nif __name__ == "__main__":\n'
    "    sys.exit(main())\n",
    "A server for language models spends its life on two kinds of work. When a request arrives, all of its tokens are "
    "known, and they can be computed together: the processor multiplies large matrices and is busy. After that every "
    "step yields one token, and the next can't begin before it is there: now the processor mostly waits for memory. "
    "Batching helps because the weights are read once for everyone. The art lies in mixing both kinds, so that those "
    "who wait for their first word don't stop those who are reading already.\n\n## Usage\n\n```python\nfrom server "
    'import Client\n\nclient = Client("http://127.0.0.1:8000")\nfor word in client.stream("Tell me a story"):\n'
    '    print(word, end="")\n```\n',
]


def load(folder: Path) -> LlamaForCausalLM:
    """The model of a prepared folder, in transformers' code and float32."""
    config = ModelConfig.load(folder)
    assert config.architecture == "llama" and config.rope_scaling is None and config.qkv_bias == config.out_bias
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
            attention_bias=config.qkv_bias,
            mlp_bias=config.mlp_bias,
        )
    )
    weights = Weights(folder, config, "f32")
    with torch.no_grad():
        # a tied head is the embedding, which the parameters list under that name
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(as_tensor(weights.vector(name, len(parameter))))
            else:
                parameter.copy_(as_matrix(weights.matrix(name, *parameter.shape)).dequantize(torch.float32))
    return model.float().eval()


def chat(text: str) -> str:
    """The first turn of a conversation, in SmolLM2's chat template."""
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
    # one entry per line, so that diffs are readable
    entries = json.dumps(reference, separators=(",", ":")).replace("},{", "},\n{").replace('],"texts"', '],\n"texts"')
    write_output(args.output, entries + "\n")
    print(
        f"{len(prompts)} prompts of {sum(map(len, prompts))} tokens, {len(texts)} texts of {sum(map(len, texts))} "
        f"tokens, in {time.monotonic() - began:.0f} s: {args.output}"
    )


if __name__ == "__main__":
    main()
