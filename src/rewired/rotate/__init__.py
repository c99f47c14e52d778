"""Rotations: another orthonormal basis for a Llama's residual stream, folded into its weights at no cost."""
