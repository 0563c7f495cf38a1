"""What all stages import; the process that they are forked from imports it once, without a GPU."""

# ruff: noqa: F401

import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama

import gpumix.cli
import proof.smoke
import proof.speed
