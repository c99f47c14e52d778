"""The model itself. Every other file of this folder travels inside checkpoints, for `trust_remote_code=True`.

So they import each other, torch, transformers and huggingface_hub (which transformers' own configs need), nothing else.
"""
