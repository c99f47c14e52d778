"""A report to PyTorch, with its program: Inductor reads a buffer before the operation that fills it has run.

    python tests/rewired/inductor_early_read.py

An operation fills a `torch.empty` buffer, as products of oneDNN and scaled products on CUDA do in vLLM. It is declared
with `mutates_args`. A later addition reads the buffer. If nothing needs that addition at once, Inductor fuses it with
others into a kernel that runs before the buffer is filled, and the result is wrong without any warning. Eager and
`aot_eager` are right, and so is the order in which every buffer is added before the next one is filled.

Twelve residual layers, largest difference to eager on torch 2.13.0, CPU:

    added at once          6e-07
    added one layer later  2e+00   <- expected as above

What helps is to take the buffer through an opaque operation without mutation, as `rewired::own` does:

    added later, owned     6e-07
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Layers = Sequence[torch.Tensor]  # the weight of each, [H, H]


@torch.library.custom_op("early_read::product", mutates_args=("out",))
def product(out: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> None:
    torch.mm(inputs, weight.t(), out=out)


@torch.library.custom_op("early_read::own", mutates_args=())
def own(output: torch.Tensor) -> torch.Tensor:
    return output.clone()


own.register_fake(torch.empty_like)


def linear(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty(inputs.shape[0], weight.shape[0])
    product(out, inputs, weight)
    return out


def added_at_once(stream: torch.Tensor, layers: Layers) -> torch.Tensor:
    for weight in layers:
        stream = stream + linear(normalised(stream), weight)
    return normalised(stream)


def added_later(
    stream: torch.Tensor, layers: Layers, take: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> torch.Tensor:
    update = torch.zeros_like(stream)
    for weight in layers:
        output = take(linear(normalised(stream), weight))
        stream, update = stream + update, output
    return normalised(stream + update)


def added_later_owned(stream: torch.Tensor, layers: Layers) -> torch.Tensor:
    return added_later(stream, layers, own)


def normalised(stream: torch.Tensor) -> torch.Tensor:
    return stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-6)


@torch.no_grad()
def error(network: Callable[[torch.Tensor, Layers], torch.Tensor], backend: str = "inductor") -> float:
    """The largest difference between a compiled network and the same in eager mode."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(64, 64, generator=generator) / 8 for _ in range(12)]
    stream = torch.randn(5, 64, generator=generator)
    difference = torch.compile(network, backend=backend)(stream, layers) - network(stream, layers)
    return difference.abs().max().item()


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    for network in (added_at_once, added_later, added_later_owned):
        print(f"{network.__name__:20} {error(network):.0e}")
