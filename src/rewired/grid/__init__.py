"""Tensor parallelism on a grid of ranks, X x Y: AxoNN's products in three dimensions, of which FSDP2 is the third."""
