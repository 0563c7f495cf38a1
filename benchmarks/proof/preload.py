"""What all stages import; the process that they are forked from imports it once, without a GPU."""

# ruff: noqa: F401

import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama

import cuda_device
import gpumix.cli
import proof.smoke
import proof.speed
from gpumix.profiler import peak

if cuda_device.is_here():  # a CPU, which takes a minute for a matrix product of a GPU's size
    peak.LARGEST["cuda"] = 256
