"""Losses: of tokens (`token_loss`, and `liger` by fused kernels), and the student's forward that gives them against a
teacher (`distillation`) or layer by layer (`alignment`)."""
