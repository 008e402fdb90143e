"""Steps on a GPU: each message is turned into launches at once; what came of them is collected when they are over.

    launch: changes of rows · copies · words of the step ──► graph ──► result on its way back, behind an event
    collect: ids, stops and records of the oldest step in flight, as the scheduler is told of them

A step may be launched before the ids of the last one are known here: they are in the rows on the GPU. A step in which a
grammar has its say needs them, so it is launched in two parts: the model first, and when the masks have come, which
takes the ids of the step before, the draw.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from pipeline.config.settings import Settings
from pipeline.kernels.draw_inputs import NO_ID
from pipeline.kernels.record_inputs import ByteArray
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray
from pipeline.kernels.triton.rows import NUM_FIELDS
from pipeline.kernels.triton.step import DEAD, STAMP_WORDS, times_of
from pipeline.messages import ExecuteFacts, Finish, Sampling, Step
from pipeline.model_folder import ModelConfig
from pipeline.stages.execute.cuda.device import Device, make_device
from pipeline.stages.execute.cuda.graphs import Kind, Recorded, Steps
from pipeline.stages.execute.cuda.model import DeviceModel, allocate_kv
from pipeline.stages.execute.cuda.rows import DeviceRows
from pipeline.stages.execute.cuda.shapes import Shapes
from pipeline.stages.execute.cuda.staging import Batch, Slot, Staging, num_words
from pipeline.stages.execute.cuda.swap import Copies
from pipeline.stages.execute.kv import divide_swap, plan_kv
from pipeline.stages.execute.masks import Masks
from pipeline.stages.execute.models.registry import record_model
from pipeline.stages.execute.pooling import Pool
from pipeline.stages.execute.prompts import NO_BYTES
from pipeline.stages.execute.rows import RowTable
from pipeline.stages.execute.runner import BoolArray, Sampled, Take
from pipeline.stages.execute.wants import Want, why_nothing_is_left
from pipeline.stages.execute.weights import Weights
