"""Checkpoints from the Hugging Face hub: just the files that make one, neither code nor pickles."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

_BASIS = "rotation.npy"  # of a rotated model's stream
# All that belongs to a checkpoint and is not code or pickle. `original/` and other subfolders stay where they are.
COMPANION_FILES = (
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "LICENSE",
    "LICENSE.*",
    "USE_POLICY*",
    "NOTICE*",
    _BASIS,
)
_CONFIGS = ("config.json", "adapter_config.json")  # an adapter is refused by name
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")

Part = Literal["config", "tokenizer", "checkpoint"]
_FILES = {
    "config": (*_CONFIGS, _WEIGHTS[1]),
    "tokenizer": (*_CONFIGS, *COMPANION_FILES),
    "checkpoint": (*_CONFIGS, "README.md", *_WEIGHTS, *COMPANION_FILES),
}

# official ids by the names people use: their ends, for most
SHORT_NAMES = {
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-8b-instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b-instruct": "meta-llama/Meta-Llama-3-70B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
    "mistral-7b-instruct": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral-nemo": "mistralai/Mistral-Nemo-Base-2407",
    "mistral-nemo-instruct": "mistralai/Mistral-Nemo-Instruct-2407",
    "mistral-small-24b": "mistralai/Mistral-Small-24B-Base-2501",
    "mistral-small-24b-instruct": "mistralai/Mistral-Small-24B-Instruct-2501",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",  # instruct: what the packaged copy holds
    "smollm2-135m-base": "HuggingFaceTB/SmolLM2-135M",
    "tinyllama-1.1b-chat": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
} | {
    repo.rpartition("/")[2].lower(): repo
    for names, sizes, kinds in (
        ("meta-llama/Llama-{}{}", ("3.1-8B", "3.1-70B", "3.1-405B", "3.2-1B", "3.2-3B"), ("", "-Instruct")),
        ("meta-llama/Llama-{}{}", ("3.3-70B",), ("-Instruct",)),
        ("Qwen/Qwen2.5-{}B{}", ("0.5", "1.5", "3", "7", "14", "32", "72"), ("", "-Instruct")),
        ("Qwen/Qwen3-{}B{}", ("0.6", "1.7", "4", "8", "14"), ("", "-Base")),
        ("Qwen/Qwen3-{}B{}", ("32",), ("",)),
        ("HuggingFaceTB/SmolLM2-{}{}", ("360M", "1.7B"), ("-Instruct",)),
    )
    for repo in (names.format(size, kind) for size in sizes for kind in kinds)
}


class HubUnreachableError(ValueError):
    """No answer from the hub; whoever has another source for the model can turn to it."""


def fetch(repo: str, revision: str | None, part: Part) -> Path:
    """A folder with that part of the repository, and its config.json; what an earlier run got is kept.

    Raises ValueError.
    """
    from huggingface_hub import snapshot_download

    patterns = list(_FILES[part])
    folder = _ask(repo, revision, lambda: snapshot_download(repo, revision=revision, allow_patterns=patterns))
    if part == "checkpoint" and (folder / "config.json").is_file() and not any(folder.glob(_WEIGHTS[0])):
        raise ValueError(
            f"{repo} holds no safetensors weights; pickled ones can run any code when they are loaded and are not "
            "fetched. Take a revision that has safetensors (--revision), or convert them to safetensors yourself."
        )
    return Path(folder)


def push(folder: Path, repo: str) -> str:
    """Upload `folder` as the hub repository `repo`, new ones private; returns its address. Raises ValueError.

    Weights of an earlier push that `folder` lacks are removed.
    """
    from huggingface_hub import HfApi

    def upload() -> str:
        api = HfApi()
        address = api.create_repo(repo, exist_ok=True, private=True)
        api.upload_folder(repo_id=repo, folder_path=folder)
        names = [name for name in api.list_repo_files(repo) if "/" not in name and not (folder / name).exists()]
        if stale := [name for name in names if any(fnmatch(name, pattern) for pattern in (*_WEIGHTS, _BASIS))]:
            api.delete_files(repo, stale)  # transformers might load these, and not the new ones
        return str(address)

    return str(_ask(repo, None, upload, verb="written"))


def files_to_push(folder: Path, repo: str) -> dict[str, int]:
    """The files of `folder` that `push` would upload, and their sizes in bytes. Raises ValueError for a bad `repo`."""
    from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects, validate_repo_id

    _ask(repo, None, lambda: validate_repo_id(repo), verb="written")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    kept = filter_repo_objects(names, ignore_patterns=DEFAULT_IGNORE_PATTERNS)
    return {name: (folder / name).stat().st_size for name in kept}


def _ask(repo: str, revision: str | None, request: Callable[[], Any], verb: str = "read") -> Any:
    """The answer to a request to the hub, as a path where it is one; its failures as sentences."""
    from huggingface_hub import errors

    try:
        answer = request()
        return Path(answer) if verb == "read" else answer
    except errors.GatedRepoError:
        raise ValueError(
            f"{repo} is gated: accept its licence on its page on the hub, then log in with `hf auth login` or "
            "set HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{repo} has no revision '{revision}': check --revision.") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"'{repo}' is neither a folder here nor a repository on the hub that you may see: check the name, or log "
            "in with `hf auth login` or HF_TOKEN if it is private."
        ) from None
    except errors.HFValidationError:
        raise ValueError(f"'{repo}' is not a folder here, and cannot be the name of a repository on the hub.") from None
    except errors.HfHubHTTPError as error:
        raise ValueError(f"The hub refused: {repo} could not be {verb} ({error.response.status_code}).") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HTTPError) as error:
        to_do = ", or the path of a folder, then run the same command again; files that came whole are kept"
        raise HubUnreachableError(
            f"The hub does not answer, and {repo} could not be {verb} ({type(error).__name__}): check the connection "
            f"and HF_ENDPOINT{to_do if verb == 'read' else ''}."
        ) from None
    except (RuntimeError, OSError) as error:  # as huggingface_hub and what moves its files say it of one
        if isinstance(error, OSError) and verb == "read":  # the disk
            raise
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{repo} could not be {verb} ({cause}).") from None
