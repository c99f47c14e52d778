"""Grids of ranks for training, ranked by AxoNN's model of communication (arXiv 2305.13525, section V).

A grid is x * y x fsdp x replicate, from the innermost dimension out: neighbours share a layer's work by rows, by
columns, then its weights, then nothing. Ring times are those of equations 1 to 3, what is sent that of equations 4 to
8, bandwidths those of equation 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

from rewired.checkpoint.shape import Shape
from rewired.hardware import Hardware
from rewired.model.family import size as width_of
from rewired.quantities import count
from rewired.tables import new_table

_ITEM = 2  # bytes of a 16-bit number
_STATE = 16  # bytes a weight: itself, its gradient, and AdamW's two moments and master copy in 32 bits
_USABLE = 0.9  # of a GPU's memory
_SUMS = ("tp", "tensor", "weights", "gradients", "communication")  # of a grid, which programs read, too
_COMPUTE = 4  # forward passes of a step: one, one again for what was not stored, two backward


def all_gather(gpus: int, size: float, bandwidth: float) -> float:
    """Equation 1: seconds, of `size` bytes that each GPU sends."""
    return (gpus - 1) * size / bandwidth


def reduce_scatter(gpus: int, size: float, bandwidth: float) -> float:
    """Equation 2."""
    return (gpus - 1) / gpus * size / bandwidth


def all_reduce(gpus: int, size: float, bandwidth: float) -> float:
    """Equation 3."""
    return 2 * (gpus - 1) / gpus * size / bandwidth


def bandwidths(grid: Sequence[int], gpus_per_node: int, within: float, between: float) -> list[float]:
    """Equation 10: the bandwidth of each dimension's rings, innermost first.

    Rings that leave their node share its bandwidth with all those that run side by side.
    """
    rates, inner = [], 1
    for size in grid:
        rates.append(within if inner * size <= gpus_per_node else between / min(gpus_per_node, inner))
        inner *= size
    return rates


class Term(NamedTuple):
    """The collectives of all layers in a step that one equation is about."""

    equation: int
    what: str
    gpus: int
    bytes: float  # that each GPU sends
    bandwidth: float  # bytes a second
    seconds: float


@dataclass(frozen=True)
class Grid:
    """What a step on a grid sends, and bytes of one rank. Computation is the same on all of them."""

    x: int
    y: int
    fsdp: int
    replicate: int
    terms: tuple[Term, Term, Term, Term, Term]  # of equations 4 to 8
    compute: float  # seconds
    memory: float

    @property
    def tensor(self) -> float:
        """Seconds of all-reduces of activations."""
        return self.terms[2].seconds + self.terms[3].seconds

    @property
    def weights(self) -> float:
        """Seconds of all-gathers of weights, and of reduce-scatters of their gradients."""
        return self.terms[0].seconds + self.terms[1].seconds

    @property
    def gradients(self) -> float:
        """Seconds of all-reduces over replicas."""
        return self.terms[4].seconds

    @property
    def tp(self) -> int:
        return self.x * self.y

    @property
    def tp_size(self) -> str:
        """As recipes have it."""
        return f"{self.x}x{self.y}" if self.y > 1 else str(self.x)

    @property
    def communication(self) -> float:
        return sum(term.seconds for term in self.terms)

    def command(self, nodes: int, gpus_per_node: int) -> str:
        """The launch line of a training."""
        launch = f"torchrun --nnodes {nodes} --nproc-per-node {gpus_per_node} -m rewired.adapt RECIPE"
        sizes = {"tp_size": self.tp_size, "fsdp_size": self.fsdp, "dp_replicate_size": self.replicate}
        return " ".join([launch, *(f"--{name} {size}" for name, size in sizes.items() if str(size) != "1")])


@dataclass(frozen=True)
class GridPlan:
    grids: list[Grid]  # best first
    left_out: list[str]  # sentences
    commands: list[str]  # of the best


def plan_grids(shape: Shape, sheet: Hardware, nodes: int, gpus_per_node: int, batch: int, tokens: int) -> GridPlan:
    """Every grid of nodes * gpus_per_node ranks for steps of `batch` sequences of `tokens`.

    Raises ValueError where none of them fits.
    """
    fitting, left_out = [], []
    for sizes in _grids(nodes * gpus_per_node):
        grid = price(shape, sheet, gpus_per_node, sizes, batch, tokens)
        name = f"tp {grid.tp_size} x fsdp {grid.fsdp} x replicate {grid.replicate}"
        if refusal := _refusal(shape, sheet, grid, batch):
            left_out.append(f"{name}: {refusal}")
        else:
            fitting.append(grid)
    if not fitting:
        raise ValueError(f"No grid of {nodes}x{gpus_per_node} {sheet.title} fits; the last one, {left_out[-1]}")
    fitting.sort(key=lambda grid: grid.communication)
    return GridPlan(fitting, left_out, [grid.command(nodes, gpus_per_node) for grid in fitting[:3]])


def print_grids(plan: GridPlan, title: str, explain: bool) -> None:
    from rich.console import Console

    console = Console(markup=False)
    sizes = ("tp", "fsdp", "replicate")
    grid = new_table(title, [*sizes, "all comm.", "activations", "weights", "gradients", "compute", "GB"], words=0)
    for each in plan.grids:
        seconds = each.communication, each.tensor, each.weights, each.gradients, each.compute
        cells = (each.tp_size, str(each.fsdp), str(each.replicate))
        grid.add_row(*cells, *(f"{time * 1e3:.1f}" for time in seconds), f"{each.memory / 1e9:.1f}")
    console.print(grid)
    if explain:
        console.print(_explanation(plan.grids[0]))
    caveat = "Ranked by AxoNN's model, in which no communication runs behind compute; times are no promise."
    for line in [*plan.left_out, caveat, "The best three, to launch:"]:
        console.print(line, soft_wrap=True, highlight=False)
    for command in plan.commands:
        console.print(f"    {command}", soft_wrap=True, highlight=False)


def _explanation(grid: Grid) -> Any:
    title = f"Where tp {grid.tp_size} x fsdp {grid.fsdp} x replicate {grid.replicate} communicates (equations 4 to 8)"
    table = new_table(title, ["", "equation", "ranks", "GB a rank", "GB/s", "ms"])
    for term in grid.terms:
        sent, seconds = f"{term.bytes / 1e9:.2f}", f"{term.seconds * 1e3:.1f}"
        table.add_row(term.what, str(term.equation), str(term.gpus), sent, f"{term.bandwidth / 1e9:.0f}", seconds)
    return table


def to_json(plan: GridPlan) -> dict[str, Any]:
    """Times in seconds, memory in bytes of one GPU."""
    grids = [
        asdict(grid)
        | {name: getattr(grid, name) for name in _SUMS}
        | {"terms": [term._asdict() for term in grid.terms]}
        for grid in plan.grids
    ]
    return {"grids": grids, "left_out": plan.left_out, "commands": plan.commands}


def price(
    shape: Shape, sheet: Hardware, gpus_per_node: int, grid: tuple[int, int, int, int], batch: int, tokens: int
) -> Grid:
    x, y, fsdp, replicate = grid
    tp = x * y
    node = sheet.network_bandwidth * gpus_per_node
    of_x, of_y, middle, outer = bandwidths(grid, gpus_per_node, sheet.link_bandwidth, node)
    rows = batch * tokens / (fsdp * replicate)  # tokens of a step on each rank
    layers = shape.num_hidden_layers
    layer = shape.layer_weights
    shard = _ITEM * layer / tp / fsdp
    activations = _ITEM * rows * shape.hidden_size / y
    forward, backward = (layer_sums(shape, x, y, _ITEM * rows, back) for back in (False, True))
    over_x, over_y = (2 * there + back for there, back in zip(forward, backward, strict=True))  # forward comes twice
    numbers = layers * layer + shape.head_weights * (1 if shape.tie_word_embeddings else 2)
    flops = 2 * batch * tokens * (layers * layer + shape.head_weights) * _COMPUTE
    return Grid(
        *grid,
        terms=(
            _term(4, "weights gathered over fsdp, twice", all_gather, fsdp, 2 * layers * shard, middle),
            _term(5, "their gradients scattered", reduce_scatter, fsdp, layers * _ITEM * layer / tp, middle),
            _term(6, "activations summed over X", all_reduce, x, layers * over_x, of_x),
            _term(7, "activations summed over Y", all_reduce, y, layers * over_y, of_y),
            _term(8, "gradients summed over replicas", all_reduce, replicate, layers * shard, outer),
        ),
        compute=flops / (math.prod(grid) * sheet.flops * 0.5),  # half of the peak, as good trainings reach
        memory=_STATE * numbers / tp / fsdp + (layers + 8) * activations,  # each layer's input is stored
    )


def _term(
    equation: int, what: str, ring: Callable[[int, float, float], float], gpus: int, size: float, bandwidth: float
) -> Term:
    seconds = ring(gpus, size, bandwidth)
    return Term(equation, what, gpus, seconds * bandwidth, bandwidth, seconds)


def layer_sums(shape: Shape, x: int, y: int, row: float, backward: bool) -> tuple[float, float]:
    """Bytes that a layer's all-reduces over X and over Y sum: equations 6 and 7, `row` of one channel's.

    Readers' outputs are summed over Y and writers' over X; in backward, the gradients of their inputs the other way.
    """
    modules = shape.family.modules
    widths = (
        [module.writer.width for module in modules]
        if backward
        else [reader.width for module in modules for reader in module.readers]
    )
    return row * len(modules) * shape.hidden_size / y, row * sum(width_of(shape, width) for width in widths) / x


def _grids(gpus: int) -> Iterator[tuple[int, int, int, int]]:
    divisors = [count for count in range(1, gpus + 1) if gpus % count == 0]
    for x, y, fsdp in product(divisors, repeat=3):
        if gpus % (x * y * fsdp) == 0:
            yield x, y, fsdp, gpus // (x * y * fsdp)


def _refusal(shape: Shape, sheet: Hardware, grid: Grid, batch: int) -> str | None:
    try:
        shape.check_shards(grid.x)
    except ValueError as error:
        return str(error)
    if shape.hidden_size % grid.y:
        return f"{grid.y} ranks do not share {shape.hidden_size} channels evenly."
    data_ranks = grid.fsdp * grid.replicate
    if batch % data_ranks:
        return f"{data_ranks} ranks do not share {count(batch, 'sequence')} evenly."
    if grid.memory > sheet.memory * _USABLE:
        return f"needs {grid.memory / 1e9:.0f} GB a GPU of {sheet.memory / 1e9:.0f}."
    return None
