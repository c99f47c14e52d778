"""On several ranks a model computes what it computes in one process, and says no more than its wiring promises."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rewired.model.reductions import start_sums_by
from rewired.ranks import run_on_ranks

from .sharded import Events, Payload, load, saved
from .test_against_reference import assert_close
from .tiny import WIRINGS, tokens

# several ranks share two cores here: `make test-slow` runs all of them
some_wirings = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("ladder-peek", "partial-mean-overlap", "mixed") else pytest.mark.slow)
        for name in WIRINGS
    ],
)

# how many channels each all-reduce of a forward pass carries, of 32; counted by hand from tiny.WIRINGS
CHANNELS = {
    "standard": [32] * 12,
    "parallel": [32] * (4 + 4),
    "ladder": [32] * 12,
    "ladder-peek": [32] * 12,
    "desync-2x": [32] * (4 + 8 // 2),
    "desync-4x-mean": [32] * (12 // 4),
    "partial": [32, 32] + [12] * 9 + [32],
    "partial-mean-overlap": [19] * 9 + [32] + [32, 32],
    "parallel-overlap-peek": [32] * 6,
    "desync-3x-overlap": [32] * 4 + [32, 32],
    "delay-2-peek": [32] * 12,
    "late-mixed": [16] * 3 + [32] * 7,
    "mixed": [32] * 4 + [16] * 3 + [32] + [32, 32],
}
# how many of them the next module hides: all in a region that does not wait, and the one before it
HIDDEN = {
    "ladder": 8,
    "ladder-peek": 11,
    "partial-mean-overlap": 9,
    "parallel-overlap-peek": 5,
    "desync-3x-overlap": 3,
    "delay-2-peek": 9,
    "late-mixed": 9,
    "mixed": 1 + 2,
}


@some_wirings
def test_two_ranks_give_the_outputs_and_greedy_tokens_of_one_process(name: str, tmp_path: Path) -> None:
    assert_answers_like_one_process(saved(WIRINGS[name], tmp_path), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", WIRINGS)
def test_four_ranks_give_the_outputs_and_greedy_tokens_of_one_process(name: str, tmp_path: Path) -> None:
    assert_answers_like_one_process(saved(WIRINGS[name], tmp_path), 4)


def assert_answers_like_one_process(folder: Path, ranks: int) -> None:
    expected_logits, expected_tokens = answers(folder, 1)
    for logits, generated in run_on_ranks(answers, ranks, folder, ranks):
        assert_close(torch.from_numpy(logits), torch.from_numpy(expected_logits), f"{ranks} ranks")
        assert generated == expected_tokens


def test_a_projection_that_is_watched_computes_the_same_on_ranks(tmp_path: Path) -> None:
    folder = saved(WIRINGS["mixed"], tmp_path)
    with torch.no_grad():
        expected = load(folder)(tokens()).logits
    for logits in run_on_ranks(logits_while_watched, 2, folder):
        assert_close(torch.from_numpy(logits), expected, "watched")


def logits_while_watched(folder: Path) -> Any:
    model = load(folder, 2)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda module, inputs: None)
    with torch.no_grad():
        return model(tokens()).logits.numpy()


def test_an_engine_s_own_all_reduce_may_start_the_sums(tmp_path: Path) -> None:
    folder = saved(WIRINGS["ladder"], tmp_path)
    for expected, found, started in run_on_ranks(answers_by_an_engine, 2, folder):
        assert found == expected
        assert started == len(CHANNELS["ladder"])


def answers_by_an_engine(folder: Path) -> tuple[Any, Any, int]:
    """Greedy tokens by torch's sums and by those of an engine, and how many of these a prompt starts."""
    model, started = load(folder, 2), []
    group = model.model.layers[0].shards.group

    def start(output: torch.Tensor) -> torch.Tensor:
        started.append(output)
        return torch.ops._c10d_functional.all_reduce(output, "sum", group)

    with torch.no_grad():
        expected = model(tokens()).logits.argmax(-1)
        start_sums_by(group, start)
        found = model(tokens()).logits.argmax(-1)
    return expected.tolist(), found.tolist(), len(started)


def answers(folder: Path, ranks: int) -> tuple[Any, list[list[int]]]:
    """Logits, and 24 greedy tokens with a cache."""
    model = load(folder, ranks)
    with torch.no_grad():
        logits = model(tokens()).logits
    return logits.numpy(), model.generate(tokens(), max_new_tokens=24, min_new_tokens=24, do_sample=False).tolist()


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Any, int, int]]]:
    """Of every wiring, what each of two ranks saw; they start once, since that takes longer than a forward pass."""
    folders = {name: saved(WIRINGS[name], tmp_path_factory.mktemp(name)) for name in WIRINGS}
    return run_on_ranks(forward_traffic, 2, folders)


def forward_traffic(folders: dict[str, Path]) -> dict[str, tuple[Any, int, int]]:
    found = {}
    for name, folder in folders.items():
        model = load(folder, 2)
        with torch.no_grad(), Events() as events:
            model(tokens())
        found[name] = (events.payloads, events.count("other"), events.hidden())
    return found


@pytest.mark.parametrize("name", WIRINGS)
def test_only_the_promised_collectives_run(name: str, traffic: list[dict[str, tuple[Any, int, int]]]) -> None:
    """Their number, their size, and how many of them the next module hides."""
    embedding, logits = 1, 1  # transformers' own: it splits the vocabulary
    for payloads, others, hidden in (rank[name] for rank in traffic):
        assert payloads[embedding:] == [
            Payload(channels, channels * tokens().numel() * 4, torch.float32) for channels in CHANNELS[name]
        ]
        assert others == logits
        assert hidden == HIDDEN.get(name, 0)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("name", "modules", "overlaps"),
    [
        ("standard", 1, False),
        ("ladder", 1, True),
        ("parallel-overlap-peek", 1, True),
        ("ladder", 2, False),
        ("delay-2-peek", 2, True),
    ],
)
def test_modules_run_while_the_all_reduce_before_them_is_held_back(
    name: str, modules: int, overlaps: bool, direction: str, tmp_path: Path
) -> None:
    """Rank 1 joins the all-reduce only when it hears that rank 0 has run the next modules, which cannot be while
    rank 0 waits for this all-reduce. No clock is involved, but for how long rank 1 waits until it gives up."""
    folder = saved(WIRINGS[name], tmp_path)
    patience = PATIENCE if overlaps else 0.5
    _, was_told = run_on_ranks(with_an_all_reduce_held_back, 2, folder, direction, modules, patience)
    assert was_told == overlaps


def with_an_all_reduce_held_back(folder: Path, direction: str, modules: int, patience: float) -> bool | None:
    model = load(folder, 2)
    # all-reduces of a module's own; an attention has four products and an MLP three, and twice as many in backward
    indices, products = ([4, 4], [3, 7]) if direction == "forward" else ([8, 6], [3, 14])
    held = HeldBack(indices[modules - 1], products=products[modules - 1], patience=patience)
    if direction == "forward":
        with torch.no_grad(), held:
            model(tokens())
    else:
        loss = model(tokens(), labels=tokens()).loss
        with held:
            loss.backward()
    return held.was_told


PATIENCE = 10.0


class HeldBack(TorchDispatchMode):
    """Rank 1 holds back its collective number `index` until rank 0 has run some matrix products after its own, or
    until its `patience` (in seconds) ends."""

    def __init__(
        self,
        index: int,
        collectives: tuple[str, ...] = ("all_reduce", "allreduce_"),
        products: int = 3,
        patience: float = PATIENCE,
    ) -> None:
        super().__init__()
        self.patience = patience
        self.index, self.collectives, self.seen, self.products = index, collectives, 0, products
        self.rank = torch.distributed.get_rank()
        self.store = torch.distributed.distributed_c10d._get_default_store()
        self.told = f"rank 0 has gone on after {index}"
        self.was_told: bool | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if name in self.collectives:
            if self.seen == self.index and self.rank == 1:
                self.was_told = self.wait_to_be_told()
            self.seen += 1
        result = func(*args, **(kwargs or {}))
        if name in Events.products and self.seen > self.index and self.rank == 0:
            self.products -= 1
            if self.products == 0:
                self.store.set(self.told, "yes")
        return result

    def wait_to_be_told(self) -> bool:
        deadline = time.monotonic() + self.patience
        while not (was_told := self.store.check([self.told])) and time.monotonic() < deadline:
            time.sleep(0.02)
        return was_told


UNEVEN = {
    "w does not divide r": ("desync-2x", {"tp_shards": 4}, 3, "tp_size 3 does not divide tp_shards 4"),
    "w is more than r": ("partial", {"tp_shards": 2}, 4, "tp_size 4 does not divide tp_shards 2"),
    "heads": (
        "ladder",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "tp_shards": 2},
        3,
        "num_attention_heads 4",
    ),
    "KV heads": ("standard", {"num_key_value_heads": 2, "tp_shards": 1}, 4, "num_key_value_heads 2"),
    "MLP width": ("parallel", {"intermediate_size": 45, "tp_shards": 1}, 2, "intermediate_size 45"),
}


@pytest.mark.parametrize(("name", "sizes", "ranks", "sentence"), UNEVEN.values(), ids=UNEVEN)
def test_ranks_that_cannot_share_evenly_are_refused_on_every_rank(
    name: str, sizes: dict[str, Any], ranks: int, sentence: str, tmp_path: Path
) -> None:
    folder = saved(WIRINGS[name], tmp_path, **sizes)
    refusals = run_on_ranks(refusal, ranks, folder, ranks)
    assert len(set(refusals)) == 1
    assert sentence in refusals[0] and "\n" not in refusals[0]


def refusal(folder: Path, ranks: int) -> str:
    with pytest.raises(ValueError) as raised:
        load(folder, ranks)
    return str(raised.value)


@pytest.mark.parametrize("name", ["standard", "parallel", "ladder"])
def test_what_does_not_depend_on_shards_needs_no_tp_shards(name: str, tmp_path: Path) -> None:
    folder = saved(WIRINGS[name], tmp_path, tp_shards=1)
    expected = hidden_states(folder, 1)[-1]
    for states in run_on_ranks(hidden_states, 4, folder, 4):
        assert_close(torch.from_numpy(states[-1]), torch.from_numpy(expected), name)


@some_wirings
def test_four_ranks_have_the_hidden_states_of_one_process(name: str, tmp_path: Path) -> None:
    """Also in the midst of a region, where some of what was contributed is not reduced yet."""
    folder = saved(WIRINGS[name], tmp_path)
    expected = hidden_states(folder, 1)
    assert len(expected) == 7
    for states in run_on_ranks(hidden_states, 4, folder, 4):
        for state, expected_state in zip(states, expected, strict=True):
            assert_close(torch.from_numpy(state), torch.from_numpy(expected_state), "hidden state")


def hidden_states(folder: Path, ranks: int) -> list[Any]:
    with torch.no_grad():
        outputs = load(folder, ranks)(tokens(), output_hidden_states=True)
    return [state.numpy() for state in outputs.hidden_states]


USER_SCRIPT = """
import sys
import torch
if sys.argv[3] == "not installed":
    sys.modules["rewired"] = None
else:
    import rewired
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], trust_remote_code=sys.argv[3] == "not installed",
    distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))
with torch.no_grad():
    logits = model(torch.tensor([[5, 6, 7]])).logits
if torch.distributed.get_rank() == 0:
    torch.save(logits, sys.argv[2])
"""


def torchrun(folder: Path, tmp_path: Path, package: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(USER_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [tmp_path / "script.py", folder, tmp_path / "logits.pt", package]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    return subprocess.run(
        [*command, *map(str, arguments)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("package", ["installed", "not installed"])
def test_torchrun(package: str, tmp_path: Path) -> None:
    folder = saved(WIRINGS["mixed"], tmp_path / "model")
    done = torchrun(folder, tmp_path, package)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = load(folder)(torch.tensor([[5, 6, 7]])).logits
    assert_close(torch.load(tmp_path / "logits.pt", weights_only=True), expected, "logits")


@pytest.mark.slow
def test_torchrun_with_ranks_that_cannot_share_evenly(tmp_path: Path) -> None:
    done = torchrun(saved(WIRINGS["desync-2x"], tmp_path / "model", tp_shards=1), tmp_path, "installed")
    assert done.returncode != 0
    assert done.stderr.count("ValueError: tp_size 2 does not divide tp_shards 1: ") == 2
