"""What the process that ranks and commands are forked from does once for all of them."""

from __future__ import annotations

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # compiles the patterns of every family: 40% of what loading a toy takes
