"""The cost of a refit, known before it starts: memory and floating-point operations. Without torch."""

from __future__ import annotations

from dataclasses import dataclass

from rewired.checkpoint.shape import Shape
from rewired.model.wiring import Wiring
from rewired.quantities import operations, size

HELD_OUT = 8  # one window of calibration text in so many is held out
FIRST = 8  # one token in so many is also taken as the first of a text, unless all texts begin alike
_FLOAT, _DOUBLE = 4, 8  # bytes
RIDGES = 3  # candidates of each fit


@dataclass(frozen=True)
class Cost:
    """`activations` are in the host's memory, `matrices` where it computes."""

    activations: int  # bytes
    matrices: int  # bytes: two layers' weights, the largest module's least-squares problem and its held-out tokens
    operations: int  # on tokens
    solves: int  # operations, too: three ridges for each least-squares problem

    @classmethod
    def of(cls, shape: Shape, wiring: Wiring, tp_shards: int, tokens: int, matrices: bool = True) -> Cost:
        """Of fitting the modules that `wiring` rewires; their gains alone if not `matrices`."""
        tokens += tokens // FIRST
        hidden, layer = shape.hidden_size, shape.layer_weights
        widest = max(shape.size(module.writer.width) for module in shape.family.modules)
        rewired = wiring.rewired_layers
        below, region = rewired[0], rewired[-1] + 1 - rewired[0]
        above = wiring.num_layers - below - region
        views = tp_shards if any(module.reads_shards for module in wiring.modules) else 1

        # the original's stream; the refitted one's: settled, and updates in flight; of each shard: what is local, and
        # of each such update its own part, and what rounding left of it
        has_local = any(module.reduce != "all" or module.sections for module in wiring.modules)
        has_payload = any(module.keeps_payload for module in wiring.modules)
        has_rest = any(module.keeps_rest for module in wiring.modules)
        in_flight = max(1, *(module.delay for module in wiring.modules))
        streams = (2 + in_flight + (has_local + in_flight * (has_payload + has_rest)) * tp_shards) * hidden
        held_out_floats = max(2 * views * hidden, widest + hidden if matrices else 0) // HELD_OUT
        problem = max(views * _problem(hidden, hidden), _problem(widest, hidden)) if matrices else 0
        # three models from the first rewired layer on, one of them on held-out tokens alone, and at last all of them
        forward = 2 * layer * (HELD_OUT * (below + 2 * region) + region + 3 * above) // HELD_OUT
        activations = tokens * _FLOAT * (streams + streams // HELD_OUT + widest)
        fits, solves = _arithmetic(shape, wiring, views) if matrices else (0, 0)
        return cls(
            activations,
            2 * layer * _FLOAT + problem * _DOUBLE + tokens * _FLOAT * held_out_floats,
            tokens * (forward + fits),
            RIDGES * solves,
        )

    def note(self) -> str:
        return (
            f"The refit needs about {size(self.activations)} of host memory for activations, {size(self.matrices)} for "
            f"matrices, on a GPU where there is one, and {operations(self.operations + self.solves)}."
        )


def _arithmetic(shape: Shape, wiring: Wiring, views: int) -> tuple[int, int]:
    """Operations of all fits: for each token, in Gram matrices and where neurons are placed; and once, in solves."""
    hidden = shape.hidden_size
    each_token = solves = 0
    for wirings in wiring.layers:
        for module, of_module in zip(shape.family.modules, wirings, strict=True):
            if not of_module.is_rewired:
                continue
            inputs = shape.size(module.writer.width)
            each_token += 2 * views * 2 * hidden * hidden + 2 * inputs * (inputs + hidden)
            solves += views * _solve(hidden, hidden) + _solve(inputs, hidden)
            if of_module.reads_shards and not module.is_attention:
                each_token += 4 * (views + 1) * hidden * inputs // HELD_OUT
    return each_token, solves


def _problem(inputs: int, outputs: int) -> int:
    """Doubles of a least-squares problem while it is solved: the Gram matrix, damped, its factor and the solver's copy
    of that, two of the right-hand side, and two solutions in float32."""
    return 4 * inputs * inputs + 3 * inputs * outputs


def _solve(inputs: int, outputs: int) -> int:
    """Operations of a Cholesky factorisation, and of both its triangular solves."""
    return inputs**3 // 3 + 2 * inputs * inputs * outputs
