"""Train a rewired model: SFT, distillation from the original, from a recipe."""
