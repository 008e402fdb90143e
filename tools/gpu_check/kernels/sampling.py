"""Checks the sampling kernels against kernels/sampling/sample.py, which computes the same noise from the same integers.

Shapes: S samples, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.sampling.logits_processor_inputs import LogitsProcessors
from pipeline.kernels.sampling.noise import exponential, halves
from pipeline.kernels.sampling.noise_keys import noise_keys, sequence_key
from pipeline.kernels.sampling.sample import thresholds
from pipeline.kernels.step_inputs import IntArray
from pipeline.kernels.triton.rows import NUM_FIELDS, Field
from tools.gpu_check import gpu
from tools.gpu_check.child import Context, Item
from tools.gpu_check.kernels.checking import check_exact
from tools.gpu_check.readings import Reading

CLOSE = 1e-4
"""Scores closer than this may be swapped by rounding. Scores are around 10, in float32."""
VOCABS = {"8B": 128256, "135M": 49152}


@dataclass(frozen=True, slots=True)
class SampledRow:
    """Sampling parameters of a row."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


PLAIN = (SampledRow(), SampledRow(0.7), SampledRow(1.0), SampledRow(3.0))
FILTERED = (
    *PLAIN,
    SampledRow(1.0, top_k=1),
    SampledRow(1.0, top_k=50),
    SampledRow(1.0, top_p=0.9),
    SampledRow(1.0, top_p=0.05),
    SampledRow(0.8, min_p=0.05),
    SampledRow(1.3, top_k=200, top_p=0.95, min_p=0.01),
    SampledRow(2.5, top_p=0.999),
    SampledRow(1.0, top_k=5000, top_p=0.5),
)


def items(context: Context) -> list[Item]:
    return [
        Item("draws", _plain),
        Item("draws, filtered", _filtered),
        Item("shaped logits", _logits_processors),
        Item("records", _token_logprobs),
    ]


def _plain(context: Context) -> Iterator[Reading]:
    yield from _cases(context, PLAIN, filtered=False)


def _filtered(context: Context) -> Iterator[Reading]:
    yield from _cases(context, FILTERED, filtered=True)


def _cases(context: Context, kinds: Sequence[SampledRow], *, filtered: bool) -> Iterator[Reading]:
    for name, vocab_size in {"tiny": 500}.items() if context.interpreted else VOCABS.items():
        for num in (len(kinds),) if context.interpreted else (1, len(kinds), 256):
            for what, scale in (("peaked", 3.0), ("flat", 0.05)):
                rows = [kinds[i % len(kinds)] for i in range(num)]
                if num == 1:
                    rows = [kinds[-1]]
                case = f"{'filtered ' if filtered else ''}draws, {name}, {num} samples, {what} logits"
                yield _check(case, rows, vocab_size, scale, filtered)


def _check(case: str, rows: Sequence[SampledRow], vocab_size: int, scale: float, filtered: bool) -> Reading:
    from pipeline.kernels.triton.sampling.sample import SamplingScratch, sample

    num = len(rows)
    logits = gpu.random(num, num, vocab_size, scale=scale)
    # Some ids are impossible, and two have equal logits.
    logits[:, ::7] = -torch.inf
    logits[:, 1] = logits[:, 2] = logits.amax(-1)
    generator = np.random.default_rng(num)
    order = generator.permutation(num)
    params, keys = _params(rows, order)
    sample_rows = torch.from_numpy(order.astype(np.int32)).to(gpu.device())
    num_known = params[sample_rows.long(), Field.NUM_IDS].contiguous()
    scratch = SamplingScratch(num, vocab_size, gpu.device())
    found = []
    for _ in range(2):
        ids = torch.full((num,), 10**8, dtype=torch.int32, device=gpu.device())
        sample(ids, logits, params, sample_rows, num_known, scratch, filtered=filtered)
        found.append(ids.cpu())
    if not torch.equal(*found):
        return check_exact(case, False, "runs differ: a race")
    wrong, unlike = 0, 0
    for i, row in enumerate(rows):
        ours = int(found[0][i])
        race, floor, scaled = _race(logits[i], row, keys[i])
        best = int(race.argmax())
        unlike += ours != best
        if not 0 <= ours < vocab_size:
            wrong += 1
            continue
        close = float(race[best] - race[ours]) < CLOSE and row.temperature > 0
        # Rounding may include or exclude the id at the filter's threshold, so both winners are correct.
        edge = (scaled - floor).abs() < CLOSE
        without = int(race.masked_fill(edge, -torch.inf).argmax())
        wrong += not (ours == best or close or (filtered and (ours == without or bool(edge[ours]))))
    return check_exact(
        case, not wrong, f"{wrong} of {num} are wrong" if wrong else f"{unlike} of {num} differ by rounding"
    )


def _params(rows: Sequence[SampledRow], order: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> tuple[Tensor, Tensor]:
    """`RowState.params` for rows in this order, and the noise key of each sample, [S, 2]."""
    params = np.zeros((len(rows) + 1, NUM_FIELDS), np.int32)
    floats = params.view(np.float32)
    params[-1, Field.ENDED] = 1
    params[:, Field.NUM_TOP] = params[:, Field.ALLOWED_AT] = -1
    sequence_keys = np.array([sequence_key(1000 + i, i) for i in range(len(rows))], np.uint64)
    num_ids = np.arange(len(rows)) * 3 + 5
    for i, row in enumerate(rows):
        index = int(order[i])
        params[index, [Field.KEY_LOW, Field.KEY_HIGH]] = sequence_keys[i : i + 1].view(np.int32)
        params[index, Field.NUM_IDS], params[index, Field.TOP_K] = num_ids[i], row.top_k
        floats[index, Field.TEMPERATURE], floats[index, Field.TOP_P] = row.temperature, row.top_p
        floats[index, Field.MIN_P] = row.min_p
    return torch.from_numpy(params).to(gpu.device()), halves(noise_keys(sequence_keys, num_ids))


def _race(logits: Tensor, row: SampledRow, key: Tensor) -> tuple[Tensor, float, Tensor]:
    """The score of each id, -inf if a filter excludes it; the filters' threshold; the scaled logits, which are compared
    with it."""
    if row.temperature == 0:
        return logits, -torch.inf, logits
    scaled = (logits - logits.amax()) / row.temperature
    device = logits.device
    floor = thresholds(
        scaled[None],
        torch.tensor([row.top_k], device=device),
        torch.tensor([row.top_p], device=device),
        torch.tensor([row.min_p], device=device),
    )[0]
    noise = exponential(key[None].to(device), len(logits))[0].double().log()
    race = (scaled.double() - noise).masked_fill(scaled < floor, -torch.inf)
    return race, float(floor), scaled


# ------------------------------------------------------------------------------------- logits processors, logprobs


def _logits_processors(context: Context) -> Iterator[Reading]:
    """Every logits processor at least once, beside rows without any; with and without grammars."""
    from pipeline.kernels.sampling.logits_processor_inputs import bits_of, num_words, pack_runs
    from pipeline.kernels.sampling.logits_processors import apply_logits_processors as apply_in_torch
    from pipeline.kernels.sampling.logits_processors import mask
    from pipeline.kernels.triton.sampling.logits_processors import LogitsProcessorScratch, apply_logits_processors
    from tests.kernels.triton.params import Row as ProcessedRow
    from tests.kernels.triton.params import list_memory_of, params_of

    for name, vocab_size in {"tiny": 300}.items() if context.interpreted else VOCABS.items():
        random = np.random.default_rng(4)
        num_ids = 40 if context.interpreted else 1500

        def some(num: int, random: np.random.Generator = random, vocab_size: int = vocab_size) -> IntArray:
            return np.unique(random.integers(0, vocab_size, num).astype(np.int32))

        rows = []
        for i in range(6 if context.interpreted else 48):
            kind = i % 6
            ids = random.integers(0, vocab_size // 4, num_ids).astype(np.int32)
            logits_processors = LogitsProcessors(ids, num_prompt=num_ids // 2)
            match kind:
                case 1:
                    logits_processors = replace(logits_processors, repetition=1.3, presence=0.4, frequency=-0.2)
                case 2:
                    bias = some(200)
                    logits_processors = replace(
                        logits_processors, bias_ids=bias, bias_values=random.normal(0, 5, len(bias)).astype("f4")
                    )
                case 3:
                    logits_processors = replace(
                        logits_processors, allowed=bits_of(some(vocab_size // 3), vocab_size), presence=1.0
                    )
                case 4:
                    runs, num = pack_runs([[7], [*ids[-2:].tolist(), 9], [1, 2, 3]], vocab_size)
                    logits_processors = replace(logits_processors, runs=runs, num_runs=num)
                case 5:
                    logits_processors = replace(logits_processors, enders=some(5), min_tokens=num_ids, frequency=0.3)
            rows.append(ProcessedRow(logits_processors=logits_processors if kind else None, num_ids=num_ids))
        params = params_of(rows)
        list_memory = list_memory_of(params, rows)
        all_ids = np.zeros((len(rows) + 1, num_ids), np.int32)
        for i, row in enumerate(rows):
            if row.logits_processors is not None:
                all_ids[i] = row.logits_processors.ids
        order = random.permutation(len(rows)).astype(np.int32)
        logits = gpu.random(5, len(rows), vocab_size, scale=3.0)
        device = gpu.device()
        for with_grammars in (False, True):
            words = np.stack([bits_of(some(vocab_size // 2), vocab_size) for _ in rows])
            masked = (random.random(len(rows)) < 0.5).astype(np.int32)
            right = logits.cpu().clone()
            for sample, index in enumerate(order.tolist()):
                grammar = words[sample] if with_grammars and masked[sample] else None
                if grammar is not None:
                    mask(right[sample], grammar)
                if (logits_processors_of := rows[index].logits_processors) is not None:
                    apply_in_torch(right[sample], logits_processors_of, num_ids, grammar)
            found = logits.clone()
            scratch = LogitsProcessorScratch(len(rows), vocab_size, device)
            assert words.shape[1] == num_words(vocab_size)
            apply_logits_processors(
                found,
                params.to(device),
                list_memory.to(device),
                torch.from_numpy(all_ids).to(device),
                torch.from_numpy(order).to(device),
                params[:, Field.NUM_IDS][torch.from_numpy(order).long()].contiguous().to(device),
                torch.from_numpy(words.view(np.int32)).to(device) if with_grammars else None,
                torch.from_numpy(masked).to(device) if with_grammars else None,
                scratch,
            )
            is_right = torch.allclose(found.cpu(), right, rtol=1e-5, atol=1e-6) and not bool(scratch.counts.any())
            case = f"shaped logits, {name}, {len(rows)} rows{', with grammars' if with_grammars else ''}"
            yield check_exact(case, is_right)


def _token_logprobs(context: Context) -> Iterator[Reading]:
    """Log probabilities and the most likely ids, against a sort."""
    from pipeline.kernels.sampling.logprobs import likeliest, log_softmax
    from pipeline.kernels.triton.sampling.logprobs import LogprobScratch, token_logprobs, top_logprobs

    for name, vocab_size in {"tiny": 300}.items() if context.interpreted else VOCABS.items():
        for num, most in ((3, 5),) if context.interpreted else ((1, 20), (64, 20), (3, 1024)):
            device = gpu.device()
            logits = gpu.random(num, num, vocab_size, scale=3.0)
            generator = torch.Generator().manual_seed(num)
            tokens = torch.randint(0, vocab_size, (num,), generator=generator, dtype=torch.int32)
            num_top = torch.tensor([(most, 0, -1, most // 2)[i % 4] for i in range(num)], dtype=torch.int32)
            out = torch.empty(num, 1 + 2 * most, dtype=torch.int32, device=device)
            scratch = LogprobScratch(num, vocab_size, most, device)
            gpu.poison(out)
            seen = logits.clone()
            top_logprobs(out, seen, num_top.to(device), most, scratch, keep=True)
            gpu.poison(seen)
            token_logprobs(out, scratch.kept, tokens.to(device), num_top.to(device), scratch)
            words = out.cpu()
            right = log_softmax(logits).cpu()
            wrong = 0
            for i in range(num):
                wanted = int(num_top[i])
                if wanted < 0:
                    continue
                top = likeliest(logits[i].cpu(), wanted)
                floats = words[i].view(torch.float32).double()
                expected = torch.cat([right[i, tokens[i : i + 1].long()], right[i, top]])
                found = torch.cat([floats[:1], floats[1 + most : 1 + most + wanted]])
                same = torch.equal(words[i, 1 : 1 + wanted].long(), top)
                wrong += not (same and torch.allclose(found, expected, rtol=1e-5, atol=1e-5))
            case = f"records, {name}, {num} samples, {most} likeliest"
            yield check_exact(case, not wrong, f"{wrong} of {num} are wrong" if wrong else "")
