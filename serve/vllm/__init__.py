"""rewired checkpoints in vLLM: a plugin, so that `vllm serve` and `LLM(...)` run every wiring.

Nothing here is imported but by vLLM, which finds `plugin.py` through the entry point `vllm.general_plugins`.

Only `vllm` itself (`LLM`, `SamplingParams`, `ModelRegistry`) is an interface that vLLM keeps. What else rewired takes
of it, here, in `bench` and in `evaluate`, may move with a release; look here first when a new one is tried:

    config                               `VllmConfig` is what a model is built from; `CUDAGraphMode`, since reductions
                                         must not be in flight where vLLM cuts a graph
    distributed                          the tensor-parallel group and its all-reduce; a bench makes the groups itself,
                                         so that several engines share its ranks
    distributed.utils                    at which layer a pipeline stage begins
    engine.arg_utils                     which options `evaluate` may hand on
    logger                               vLLM's own log
    model_executor.layers.linear         the projections whose held shards are computed one by one
    model_executor.model_loader          a bench loads random weights, the same in all engines
    model_executor.models                the stock layers and models that ours are; `config` has the hook that checks an
                                         engine's settings before a worker starts
    model_executor.utils                 how a parameter is told which part of a tensor it loads
    platforms                            whether this is a GPU
"""
