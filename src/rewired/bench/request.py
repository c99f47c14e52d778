"""What is asked of a bench, and what of it is refused before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

WHOSE = "h100:vllm"  # collectives an emulation takes the times of, where nothing else is said
TRANSFORMERS, VLLM = "transformers", "vllm"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Emulation:
    """How the collectives of ranks that are not there run here, but for their times."""

    blocks: int = 16  # of threads, each of which takes a GPU's processor, or part of one
    is_urgent: bool = True  # on a stream of high priority


@dataclass(frozen=True)
class BenchRequest:
    """What all cells of a bench share; a cell is a number of ranks and a batch.

    `model` is a shape's name or a checkpoint, `layers` how many of its layers are run (all, where None), `rounds` how
    often each contender is timed, `link` the emulated link beside the machine's own, or `no-p2p` on NVIDIA. With an
    `emulation` one rank is alone, and `link` says whose all-reduces it waits for, such as `h100:vllm`.
    """

    model: str
    wirings: tuple[str, ...]
    prompt: int = 1024
    new: int = 128
    layers: int | None = None
    rounds: int = 9
    dtype: str = "bfloat16"
    device: str = "cuda"
    link: str | None = None
    is_compiled: bool = True
    engine: str = TRANSFORMERS
    emulation: Emulation | None = None
    trains: bool = False  # steps of training are timed, and nothing else; `new` and `is_compiled` do not matter
    fsdp: int = 1  # times as many ranks, which share out weights by FSDP2

    def __post_init__(self) -> None:
        for flag, value in {"--prompt": self.prompt, "--new": self.new, "--layers": self.layers}.items():
            if value is not None and value < 1:
                raise ValueError(f"{flag} is {value}: it must be at least 1.")
        if self.rounds < 3:
            raise ValueError(f"--rounds is {self.rounds}: quartiles need at least 3.")
        if self.engine not in (TRANSFORMERS, VLLM):
            raise ValueError(f"--engine {self.engine} is not known: choose {TRANSFORMERS} or {VLLM}.")
        if self.engine != TRANSFORMERS and self.new < 2:
            raise ValueError(f"--new is {self.new}: with --engine {self.engine}, the first token counts as prefill.")
        if self.trains and self.engine != TRANSFORMERS:
            raise ValueError("--train times models in transformers: leave it out, or --engine vllm.")
        if self.trains and self.prompt < 2:
            raise ValueError("--train learns to predict the next token: give --prompt at least 2.")
        if self.fsdp > 1 and (not self.trains or self.emulation):
            raise ValueError("--fsdp shares out weights while they are trained: add --train, without --emulated.")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype} is not known: choose {', '.join(DTYPES)}, or auto.")
