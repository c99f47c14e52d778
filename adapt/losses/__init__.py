"""Losses: of tokens (`token_loss`), and the student's forward that gives them against a teacher (`distillation`)."""
