"""Original against rewired: benchmarks through lm-evaluation-harness, and how far the distributions part."""

if __name__ == "evaluate":
    raise ImportError(
        "This folder is rewired.evaluate, and hides Hugging Face's package `evaluate` because Python was started with "
        "the repository's root on sys.path: start it elsewhere, or by an installed command."
    )
