"""Access to a row's parameters in kernels: `Field` as constexpr indices, and floats from their bits."""

import triton
import triton.language as tl

from pipeline.kernels.sampling.sampling_inputs import GREEDY_BELOW, NO_ID
from pipeline.kernels.triton.rows import Field

ENDED = tl.constexpr(Field.ENDED.value)
NUM_PROMPT = tl.constexpr(Field.NUM_PROMPT.value)
TEMPERATURE = tl.constexpr(Field.TEMPERATURE.value)
TOP_P = tl.constexpr(Field.TOP_P.value)
MIN_P = tl.constexpr(Field.MIN_P.value)
TOP_K = tl.constexpr(Field.TOP_K.value)
KEY_LOW = tl.constexpr(Field.KEY_LOW.value)
KEY_HIGH = tl.constexpr(Field.KEY_HIGH.value)
HAS_LOGITS_PROCESSORS = tl.constexpr(Field.HAS_LOGITS_PROCESSORS.value)
REPETITION = tl.constexpr(Field.REPETITION.value)
PRESENCE = tl.constexpr(Field.PRESENCE.value)
FREQUENCY = tl.constexpr(Field.FREQUENCY.value)
MIN_TOKENS = tl.constexpr(Field.MIN_TOKENS.value)
ENDERS_AT = tl.constexpr(Field.ENDERS_AT.value)
NUM_ENDERS = tl.constexpr(Field.NUM_ENDERS.value)
BIAS_AT = tl.constexpr(Field.BIAS_AT.value)
NUM_BIAS = tl.constexpr(Field.NUM_BIAS.value)
RUNS_AT = tl.constexpr(Field.RUNS_AT.value)
NUM_RUNS = tl.constexpr(Field.NUM_RUNS.value)
ALLOWED_AT = tl.constexpr(Field.ALLOWED_AT.value)

COLD = tl.constexpr(GREEDY_BELOW)
NO_CANDIDATE = tl.constexpr(NO_ID)


@triton.jit
def float_at(pointer):
    """The float32 whose bits are in an int32."""
    return tl.load(pointer).to(tl.float32, bitcast=True)
