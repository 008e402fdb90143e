"""Launches of attention, to be compiled."""

import torch

from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton.attention import attend
from pipeline.kernels.triton.attention_tasks import AttentionTasks
from pipeline.kernels.triton.rows import StepArrays

LLAMA_8B = (32, 8, 128)
LLAMA_1B = (32, 8, 64)
SMOLLM2_135M = (9, 3, 64)


def _launch(
    shape: tuple[int, int, int], dtype: torch.dtype, window: int | None, num_entries: int, num_tokens: int
) -> None:
    num_heads, num_kv_heads, head_dim = shape
    device = torch.device("cpu")
    tasks = AttentionTasks(16, 2048, num_heads, num_kv_heads, head_dim, dtype, device, window)
    ints = torch.zeros(num_tokens, dtype=torch.int32)
    of_entries = torch.zeros(num_entries, dtype=torch.int32)
    step = StepArrays(
        of_entries, of_entries, of_entries, of_entries, ints, ints, ints.long(), of_entries, of_entries,
        torch.zeros((4, 64), dtype=torch.int32),
    )  # fmt: skip
    queries = torch.zeros((num_tokens, num_heads * head_dim), dtype=dtype)
    keys = torch.zeros((4, num_kv_heads, BLOCK_SIZE, head_dim), dtype=dtype)
    tasks.plan(step, one_each=num_tokens == num_entries)
    attend(queries.clone(), queries, keys, keys.clone(), step, tasks)


def launches() -> None:
    _launch(LLAMA_8B, torch.bfloat16, None, 4, 4)
    _launch(LLAMA_8B, torch.bfloat16, None, 4, 1024)
    _launch(SMOLLM2_135M, torch.bfloat16, None, 4, 8)
