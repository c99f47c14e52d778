"""What the models of all families share: stock models whose layers pass a residual stream along.

A family's classes stand in a file of their own, `modeling_rewired_llama.py`: each is one of these before the stock one.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.integrations.accelerate import offload_weight
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, OutputRecorder

from .family import Family
from .residual_stream import PeekGain, ResidualStream
from .rewired_layer import RewiredLayer
from .tensor_parallel import RewiredLayerParallel


class RewiredPreTrainedModel(PreTrainedModel):
    """Before a stock pre-trained model among the bases of a class."""

    family: ClassVar[Family]
    layer_class: ClassVar[type[RewiredLayer]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Tell transformers what follows from a family's class of layers."""
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "layer_class"):
            cls._no_split_modules = [cls.layer_class.__name__]
            # conversion writes no tensors: gains that a checkpoint does not hold are at their initial value
            cls._keys_to_ignore_on_load_missing = [rf"{gain}\.weight$" for gain in cls.family.gains]
            # a layer's output is the whole stream, and `RewiredModel` opens it
            recorded = OutputRecorder(cls.layer_class, index=slice(None))  # type: ignore[arg-type]
            cls._can_record_outputs = (cls._can_record_outputs or {}) | {"hidden_states": recorded}

    @classmethod
    def is_backend_compatible(cls) -> bool:
        """Raise ValueError: an engine that splits this model by transformers' plan alone would lose its wiring."""
        raise ValueError(
            "A rewired model cannot be served through an engine's Transformers backend, which does not know its "
            "all-reduces: for vLLM, install rewired with its extra 'vllm', which brings a plugin that does."
        )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PeekGain):
            init.ones_(module.weight)

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, files: Any, load_config: Any, *args: Any) -> Any:
        """transformers' own, which looks for what is offloaded in files: gains that none holds are put in one."""
        info, offloaded = PreTrainedModel._load_pretrained_model(model, state_dict, files, load_config, *args)
        for name in info.missing_keys if offloaded is not None else ():
            module = model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, PeekGain):
                ones = torch.ones_like(module.weight, device="cpu")
                offload_weight(ones, name, load_config.disk_offload_folder, offloaded)
        return info, offloaded

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "Re-entrant gradient checkpointing does not see the tensors inside the residual stream and would give "
                "wrong gradients: use gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        options = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})  # torch would be re-entrant
        super().gradient_checkpointing_enable(options, **kwargs)


class RewiredModel(RewiredPreTrainedModel):
    """Before a stock model without its head; its layers pass a residual stream along."""

    _auto_class = "AutoModel"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rewire()

    @property
    def decoder_layers(self) -> Any:
        return self.get_submodule(self.family.layers)

    @property
    def last_norm(self) -> Any:
        return self.get_submodule(self.family.last_norm)

    def rewire(self) -> None:
        """Make rewired layers of what the stock constructor has built."""
        # as a constructor does, for a class that became ours; transformers 5.19 and 5.23 look it up alike
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(self)), self._can_record_outputs)
        wirings = self.config.resolved_wiring.layers
        for index, layer in enumerate(self.decoder_layers):
            layer.__class__ = self.layer_class
            layer.rewire(self.config, index, wirings[index])
        self.register_forward_hook(_with_whole_streams)


def _with_whole_streams(model: Any, args: Any, outputs: Any) -> Any:
    """A forward hook: `hidden_states[i]` is all that was contributed before layer i, reduced or not.

    A hook and no method, so that tools which trace a stock model's `forward` find it as it is.
    """
    shards = model.decoder_layers[0].shards

    def whole(recorded: Any) -> Any:
        if not isinstance(recorded, tuple):
            return recorded
        return tuple(ResidualStream(*one).total(shards) if isinstance(one, tuple) else one for one in recorded)

    if isinstance(outputs, tuple):
        return tuple(map(whole, outputs))
    if outputs.hidden_states is not None:
        outputs.hidden_states = whole(outputs.hidden_states)
    return outputs


class RewiredForCausalLM(RewiredPreTrainedModel):
    """Before a stock language model; its base becomes a `base_class`, in place."""

    _auto_class = "AutoModelForCausalLM"
    base_class: ClassVar[type[RewiredModel]]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        base: Any = self.base
        base.__class__ = self.base_class
        base.rewire()

    @property
    def base(self) -> RewiredModel:
        """The model without its head."""
        return cast(RewiredModel, self.get_submodule(self.family.base))


ALL_PARALLEL_STYLES.register("rewired_layer", RewiredLayerParallel())  # type: ignore[arg-type]
