"""The model's own code. Every other file here travels in a checkpoint, for `trust_remote_code=True`, and so imports
torch, transformers, huggingface_hub (as transformers' own configs do) and its neighbours here, nothing else."""
