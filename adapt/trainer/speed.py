"""How well a training uses its devices: the share of their peak."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rewired import hardware

from ..model.teacher import Teacher
from ..model.trainable import is_trained


def flops_per_token(student: Any, teacher: Teacher | None) -> int:
    """Of the products of a step: 2 for each weight of a forward pass, the teacher's, too. Backward takes 2 for each
    trained weight, and 2 for each weight from the first layer on that is trained.

    The logits are those of all tokens. What is computed once more is not counted.
    """
    layers, config = list(student.base.decoder_layers), student.config
    head, learns_head = config.vocab_size * config.hidden_size, student.get_output_embeddings().weight.requires_grad
    trained = [is_trained(part) for part in (student.get_input_embeddings(), *layers)]
    first = max(trained.index(True) - 1, 0) if any(trained) else len(layers)
    forward = _weights(layers) + head
    backward = _weights(layers[first:]) + head + _weights(layers, only_trained=True) + head * learns_head
    return 2 * (forward + backward + (_weights(layers[max(teacher.first, 0) :]) + head if teacher else 0))


def _weights(layers: list[nn.Module], only_trained: bool = False) -> int:
    """Those that multiply. Quantised ones are held as fewer numbers."""
    linears = [each for layer in layers for each in layer.modules() if isinstance(each, nn.Linear)]
    chosen = [each for each in linears if each.weight.requires_grad or not only_trained]
    return sum(each.in_features * each.out_features for each in chosen)


def peak_flops(device: torch.device) -> float | None:
    """A second, in 16 bits; None of CPUs, and of GPUs that have no data sheet here."""
    sheet = hardware.of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return sheet.flops if sheet else None
