"""rewired checkpoints in vLLM: a plugin, so that `vllm serve` and `LLM(...)` run every wiring.

Nothing here is imported but by vLLM, which finds `plugin.py` through the entry point `vllm.general_plugins`.
"""
