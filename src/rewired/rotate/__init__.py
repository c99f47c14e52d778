"""Rotations: another orthonormal basis for a model's residual stream, folded into its weights at no cost."""
