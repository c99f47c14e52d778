"""How many of a draft's tokens a model accepts in vLLM, greedily, on eight chats: a row for results/vllm-tests.md.

.venv-vllm/bin/python studies/acceptance.py TARGET DRAFT
"""

from __future__ import annotations

import os
import sys

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
QUESTIONS = (
    "How do I bake bread?",
    "Explain why the sky is blue.",
    "Write a short story about a river.",
    "What is 17 times 23?",
    "List five facts about cats.",
    "Summarise the plot of Hamlet.",
    "Give me tips for a job interview.",
    "What is photosynthesis?",
)
DRAFTED, NEW_TOKENS = 4, 96


def main() -> None:
    os.environ |= SETTINGS  # before vLLM reads them
    from vllm import LLM, SamplingParams

    target, draft = sys.argv[1:]
    engine = LLM(
        target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 29,
        disable_log_stats=False,
        speculative_config={"method": "draft_model", "model": draft, "num_speculative_tokens": DRAFTED},
    )
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    engine.chat(chats, SamplingParams(temperature=0, max_tokens=NEW_TOKENS), use_tqdm=False)
    counts = {metric.name.rpartition("_num_")[2]: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    accepted, drafted = counts["accepted_tokens"], counts["draft_tokens"]
    print(f"| {target} | {draft} | {accepted} of {drafted} | {accepted / counts['drafts'] + 1:.2f} |", flush=True)
    os._exit(0)  # vLLM's own end takes long


if __name__ == "__main__":
    main()
