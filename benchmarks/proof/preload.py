"""What all stages import; the process that they are forked from imports it once, without a GPU."""

# ruff: noqa: F401

import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama

import cuda_device
import gpumix.cli
import proof.smoke
import proof.speed
from gpumix.profiler import agreement, network, optimizer_times, peak

if cuda_device.is_here():  # a CPU, which takes minutes for measurements of a GPU's size
    peak.LARGEST["cuda"] = 256
    optimizer_times.OPTIMIZER_NUMEL = 2**18
    agreement.ROOT_ELEMENTS = 2**18
    network.MOST_PRODUCT = 256
