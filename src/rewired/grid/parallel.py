"""A model on a grid of X x Y ranks, as AxoNN splits it (arXiv 2305.13525, section III).

Rank x + X * y holds, of a layer with r shards,

    the stream     channels y of H, and of what X shares, the parts of its shards: tensor parallelism on H / Y channels
    a reader       rows x and columns y of its weight; outputs are summed over Y
    a writer       rows y and columns x of its weight; outputs are summed over X, by the stream
    a norm         channels y of its weight; squares are summed over Y

so that no activation is ever laid out anew. Where a wiring treats some channels otherwise, "channels y" are those of
each of its blocks (`blocks_of`): every rank has its part of the ones and of the others. The stream does not know Y.

Inside a module, Y ranks compute the same, and gradients are whole; a writer's input gets a part of its gradient from
each, which is summed over Y. The embedding and the head stay transformers' own, split over all X * Y ranks: channels
are taken behind the one, and gathered before the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import linear
from torch.nn.utils.stateless import _reparametrize_module
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
from transformers.utils import ModelOutput

from rewired.model.collectives import sum_gradients
from rewired.model.configuration import RewiredConfig
from rewired.model.reductions import Reduction, finish
from rewired.model.sharding import OnShards, Shards, is_plain_linear, on_this_rank, summed
from rewired.model.tensor_parallel import check_not_quantised, shards_of_rank
from rewired.model.wiring import Wiring

from .meshes import axes, grid_of
from .size import TpSize, blocks_of, check
from .weights import NORM, parts, split, split_fsdp2_in_blocks


def tp_plan(config: Any, size: TpSize, fsdp_size: int = 1) -> dict[str, str] | Literal["auto"] | None:
    """What `DistributedConfig` takes beside `tp_size` and `fsdp_size` for a language model of this RewiredConfig.

    Raises ValueError, with the numbers that would do, for a grid that the model does not fit, and for a model that is
    not rewired.
    """
    if size.y == 1:
        return "auto" if size > 1 else None
    if not isinstance(config, RewiredConfig):
        raise ValueError(
            f"tp_size {size} is a grid, on which rewired models run: convert this one with --wiring standard, or give "
            f"tp_size {size.x}."
        )
    check_not_quantised(config)
    check(config, size, fsdp_size)
    blocks, base = blocks_of(config, fsdp_size), config.family.base
    style = f"grid_{size}_of_{blocks}_behind_{fsdp_size}"
    ALL_PARALLEL_STYLES.register(style, GridParallel(size.x, size.y, blocks, fsdp_size))  # type: ignore[arg-type]
    if blocks > 1:
        split_fsdp2_in_blocks()
    layers = {f"{base}.{pattern}": "replicate" for pattern in config.base_model_tp_plan or ()}  # the base splits them
    return {base: style, **layers}


class GridParallel(TensorParallelLayer):
    """Splits a model without its head. It is transformers' style for the base, and does its layers' part, too.

    Y takes its part from each of so many blocks of channels: a teacher reads channels that its student has split.
    """

    def __init__(self, x: int, y: int, blocks: int, fsdp_size: int) -> None:
        self.x, self.y, self.blocks, self.fsdp_size = x, y, blocks, fsdp_size

    def install_forward(self, base: Any, mesh: DeviceMesh) -> Any:
        blocks, fsdp_size, mesh = self.blocks, self.fsdp_size, grid_of(mesh, self.x, self.y)
        y_mesh, x_mesh = axes(mesh)
        config, family = base.config, base.family
        shards = shards_of_rank(config, x_mesh)
        y = _Ranks(y_mesh.get_group().group_name, self.y)
        wirings = Wiring.from_json(config.wiring, config.num_hidden_layers, config.hidden_size // self.y).layers
        for layer, of_layer in zip(base.decoder_layers, wirings, strict=True):
            layer.wirings = of_layer
            layer.place(shards)
            layer.forward = partial(_run_layer, layer, layer.forward, (y.group, shards.group))
            for names, wiring in zip(family.modules, of_layer, strict=True):
                stock, norm = layer.get_submodule(names.path), layer.get_submodule(names.norm)
                stock.wiring = wiring
                projections = {each.name: stock.get_submodule(each.name) for each in names.linears}
                stock.forward = partial(_run_module, stock, projections, stock.forward, y)
                norm.forward = partial(_normalise, norm, y)
                for module, placements in parts(layer, names):
                    split(module, placements, mesh, blocks, fsdp_size)
        base.last_norm.forward = partial(_normalise, base.last_norm, y)
        split(base.last_norm, NORM, mesh, blocks, fsdp_size)
        own, whole = partial(_own_channels, blocks, y_mesh), partial(_whole_channels, blocks, y_mesh)
        base.get_submodule(family.embedding).register_forward_hook(lambda *args: own(args[-1]))
        base.register_forward_pre_hook(partial(_with_own_channels, config.hidden_size, own), with_kwargs=True)
        base.register_forward_hook(lambda *args: _with_whole_channels(args[-1], whole))
        return base


class _Ranks(NamedTuple):
    """Those that share columns, by their process group's name."""

    group: str
    number: int


def _run_layer(layer: Any, run: Callable[..., Any], groups: Sequence[str | None], *args: Any, **kwargs: Any) -> Any:
    """Run `layer` on parameters whose gradients are summed over ranks that hold the same, each of which gets a part.

    Over X, these are all that X does not split; over Y, the readers' biases.
    """
    summed: dict[str, torch.Tensor] = {}
    for dim, group in enumerate(groups) if torch.is_grad_enabled() else ():
        own = {name: p for name, p in layer.named_parameters() if p.requires_grad and _is_replicated(p, dim)}
        if own:
            summed |= zip(own, sum_gradients(group, *map(on_this_rank, own.values())), strict=True)
    with _reparametrize_module(layer, summed):
        return run(*args, **kwargs)


def _is_replicated(parameter: torch.Tensor, dim: int) -> bool:
    """Whether the ranks of a mesh's dimension hold the same. What is inside a module gets its whole gradient in Y."""
    return parameter.placements[dim].is_replicate() if isinstance(parameter, DTensor) else dim == 1


def _run_module(
    stock: Any,
    projections: Mapping[str, nn.Module],
    run: Callable[..., Any],
    y: _Ranks,
    *args: Any,
    stand_ins: Any = None,
    **kwargs: Any,
) -> Any:
    """Run an attention or MLP whose readers' outputs, and whose writer's input's gradients, are summed over Y.

    Raises ValueError for adapters that were added to a model on its ranks.
    """
    wiring, names = stock.wiring, stock.names
    if any(stock.get_submodule(path) is not projection for path, projection in projections.items()):
        raise ValueError(
            "A model on a grid of ranks takes no adapters: `adapt` adds them before it splits the model, with "
            "train: lora."
        )
    plain = OnShards(stock, names, stock.shards, wiring.reads_shards, wiring.gives_partials, stand_ins)
    on_grid = {
        each.name: partial(_read, getattr(plain, each.name), getattr(stock, each.name).bias, y)
        for each in names.readers
    }
    writer = stock.get_submodule(names.writer.name)
    hides = is_plain_linear(writer) and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    on_grid[names.writer.name] = (
        partial(_write_overlapped, writer, stock.shards, wiring.gives_partials, y)
        if hides
        else partial(_write, getattr(plain, names.writer.name), y)
    )
    return run(*args, stand_ins=on_grid, **kwargs)


def _read(project: Callable[[torch.Tensor], torch.Tensor], bias: Any, y: _Ranks, views: torch.Tensor) -> torch.Tensor:
    """The sum is waited for when it is used: those of several readers are under way at once."""
    own = project(views)
    if bias is not None:  # each rank adds its equal part
        own = own - (on_this_rank(bias) * (1 - 1 / y.number)).to(own.dtype)
    return _sum(own, y)


def _write(project: Callable[[torch.Tensor], torch.Tensor], y: _Ranks, hidden_states: torch.Tensor) -> torch.Tensor:
    return project(sum_gradients(y.group, hidden_states)[0])


def _write_overlapped(
    projection: nn.Linear, shards: Shards, gives_partials: bool, y: _Ranks, hidden_states: torch.Tensor
) -> torch.Tensor:
    """The same, where the gradient of `hidden_states` is summed over Y while the weight's is computed."""
    shards = shards if gives_partials else shards.as_one()
    weight, bias = on_this_rank(projection.weight), on_this_rank(projection.bias)
    parts: torch.Tensor = _Product.apply(hidden_states, weight, shards.held, y.group)
    if bias is not None:
        parts = parts + (bias / shards.total).to(parts.dtype)
    return parts if gives_partials else summed(parts)


class _Product(torch.autograd.Function):
    """[B, T, in] -> [r, B, T, out / Y], with AxoNN's overlap (section IV A) in backward."""

    @staticmethod
    def forward(ctx: Any, hidden_states: torch.Tensor, weight: torch.Tensor, held: int, group: str) -> torch.Tensor:
        ctx.save_for_backward(hidden_states, weight)
        ctx.held, ctx.group = held, group
        if held == 1:
            return linear(hidden_states, weight)[None]
        return torch.einsum("btri,hri->rbth", hidden_states.unflatten(-1, (held, -1)), weight.unflatten(1, (held, -1)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        states, weight = (each.to(gradient.dtype) for each in ctx.saved_tensors)  # as autocast had cast them
        of_states = of_weight = None
        if ctx.needs_input_grad[0]:
            part = torch.einsum("rbth,hri->btri", gradient, weight.unflatten(1, (ctx.held, -1))).flatten(-2)
            (of_states,) = Reduction(ctx.group, adds_in_float32=True).start(part)
        if ctx.needs_input_grad[1]:
            of_weight = torch.einsum("rbth,btri->hri", gradient, states.unflatten(-1, (ctx.held, -1))).flatten(1)
        return of_states, of_weight, None, None


def _sum(own: torch.Tensor, y: _Ranks) -> torch.Tensor:
    """Over the ranks that share columns, each of which knows the whole gradient."""
    summed: torch.Tensor = _Sum.apply(own, Reduction(y.group, adds_in_float32=torch.is_grad_enabled()))
    return summed


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        (started,) = reduction.start(own)
        return finish(started) if torch.compiler.is_compiling() else started  # a graph would not wait

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _normalise(norm: Any, y: _Ranks, view: torch.Tensor) -> torch.Tensor:
    """RMSNorm of channels that ranks share, [..., H / Y], in float32 as transformers' own."""
    wide = view.float()
    squares = wide.square().mean(-1, keepdim=True)
    (mean,) = sum_gradients(y.group, _sum(squares, y) / y.number)
    return on_this_rank(norm.weight) * (wide * torch.rsqrt(mean + norm.variance_epsilon)).to(view.dtype)


def _own_channels(blocks: int, mesh: DeviceMesh, states: torch.Tensor) -> torch.Tensor:
    """[B, T, H] -> [B, T, H / Y]; in backward, a gather."""
    in_blocks = DTensor.from_local(states.unflatten(-1, (blocks, -1)), mesh, [Replicate()])
    own: torch.Tensor = in_blocks.redistribute(placements=[Shard(-1)]).to_local()
    return own.flatten(-2)


def _whole_channels(blocks: int, mesh: DeviceMesh, states: torch.Tensor) -> torch.Tensor:
    """[B, T, H / Y] -> [B, T, H]; in backward, this rank's part of a gradient that is the same on all."""
    in_blocks = DTensor.from_local(states.unflatten(-1, (blocks, -1)), mesh, [Shard(-1)])
    return in_blocks.full_tensor(grad_placements=[Replicate()]).flatten(-2)


def _with_own_channels(
    width: int, own: Callable[[torch.Tensor], torch.Tensor], base: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """A hook before the base: `inputs_embeds` come whole, unless its own embedding has made them."""
    embeds = kwargs.get("inputs_embeds")
    if embeds is not None and embeds.shape[-1] == width:
        kwargs["inputs_embeds"] = own(embeds)
    return args, kwargs


def _with_whole_channels(outputs: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The base's outputs, as whoever reads them knows them."""
    if isinstance(outputs, torch.Tensor):
        return whole(outputs) if outputs.dim() == 3 else outputs  # attentions have four dimensions
    if isinstance(outputs, tuple):
        return tuple(_with_whole_channels(part, whole) for part in outputs)
    if isinstance(outputs, ModelOutput):
        for name in ("last_hidden_state", "hidden_states"):
            setattr(outputs, name, _with_whole_channels(getattr(outputs, name), whole))
    return outputs
