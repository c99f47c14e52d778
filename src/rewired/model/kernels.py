"""Kernels: functions of tensors that CUDA devices run compiled, in few passes over their memory.

The function itself is what a CPU runs, and what a compiled one, which keeps eager mode's roundings, equals bit for bit.
`TORCH_COMPILE_DISABLE=1` is the way to have eager mode on GPUs, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from inspect import signature
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])
_DEVICES = {"cuda"}

# as eager mode rounds: to 16 bits where it does, products before sums, divisions correctly; of those that torch has
_ROUNDING = ("emulate_precision_casts", "eager_numerics.division_rounding")
_OWN_LIMIT: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
)


def kernel(any_number: int | None = None) -> Callable[[_F], _F]:
    """Makes a kernel of a function of tensors, by position, and of what is constant in a program, by keyword.

    All sizes are constant, too, but for dimension `any_number` of all tensors, which is compiled once, and once for 1.
    """

    def make(function: _F) -> _F:
        @wraps(function)
        def run(*tensors: torch.Tensor, **constants: Any) -> Any:
            if tensors[0].device.type not in _DEVICES:
                return function(*tensors, **constants)
            tensors = tuple(tensor.detach() if tensor.requires_grad else tensor for tensor in tensors)
            if any_number is not None:
                for tensor in tensors:
                    torch._dynamo.maybe_mark_dynamic(tensor, any_number)
            with torch.no_grad():
                return _compiled(function, tuple(constants.items()))(*tensors)

        return run  # type: ignore[return-value]

    return make


@cache
def _compiled(function: Callable[..., Any], constants: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    options: dict[str, Any] = {name: True for name in _ROUNDING if name in torch._inductor.list_options()}
    # with `fullgraph`, what exceeds the limit of recompiles would be an error, and not run in eager mode
    return torch.compile(partial(function, **dict(constants)), dynamic=False, options=options, **_OWN_LIMIT)
