"""How well a training uses its devices: the share of their peak, and the share of a step that waits for other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rewired import hardware

from ..model.teacher import Teacher
from ..model.trainable import is_trained

_WAIT = torch.ops._c10d_functional.wait_tensor.default


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


class Waits:
    """The seconds of steps, and those of them for which compute waits for reductions of tensor-parallel ranks."""

    def __init__(self) -> None:
        self.seconds = self.waited = 0.0

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Times the operation that waits: by the clock, or on a GPU by events on the stream. The step must end done.

        What waits within another wait, or on a stream beside the step's, is an exchange's own business.
        """
        spans, stream, is_within = list[tuple[Any, Any]](), _stream(), False

        def wait(total: torch.Tensor) -> torch.Tensor:
            nonlocal is_within
            is_timed = not is_within and _stream() == stream
            is_within, began = True, _now(total) if is_timed else None
            arrived: torch.Tensor = _WAIT._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, total)
            if is_timed:
                spans.append((began, _now(total)))
                is_within = False
            return arrived

        library, began = torch.library.Library("_c10d_functional", "IMPL"), time.perf_counter()
        for backend in ("CPU", "CUDA"):
            library.impl("wait_tensor", wait, backend)
        try:
            yield
        finally:
            library._destroy()
        self.seconds += time.perf_counter() - began
        self.waited += sum(map(_seconds, spans))

    def share(self) -> float:
        """Of the steps since this was asked last."""
        share = self.waited / self.seconds
        self.seconds = self.waited = 0.0
        return share


def _stream() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _now(tensor: torch.Tensor) -> Any:
    if not tensor.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(span: tuple[Any, Any]) -> float:
    began, ended = span
    return float(ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3)
