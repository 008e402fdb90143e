"""Many random steps, too slow for CI: `python -m tests.kernels.triton.random_attention 100`."""

import os
import random
import sys


def main() -> None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from tests.kernels.triton.attention import test_attention, test_attention_decode

    num = int(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for seed in range(first, first + num):
        print(f"seed={seed}", flush=True)
        test_attention.check_random(random.Random(seed))
        test_attention_decode.check_random(random.Random(seed))


if __name__ == "__main__":
    main()
