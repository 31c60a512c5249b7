"""Plans as the backend of other programs.

==================  ==================================================================================
``numba_callers``   for callers that Numba compiles: ``fastroof.numba_step``, ``fastroof.numba_decode``
``c``               for C, C++, Rust and Go: plan files, a header, an object file, examples; BLIS
``vidur``           predictors for Vidur: ``native`` for the package on PyPI, ``tree`` for the source tree
``frontier``        a predictor for Frontier, co-located or prefill and decode apart
``sglang``          a predictor for the SGLang simulator, in its process or as its model file
``dynamo``          profiles for Dynamo's mocker
``aisimulate``      tables of whole steps for AISimulate
``llmservingsim``   profiles for LLMServingSim
``llm_d``           settings for llm-d-inference-sim
``vllm_engine``     vLLM without a GPU: its executor with a plan's times
``releases``        which releases were run, and the warning if another is installed
``serve``           for every other program: a server on a pipe or over HTTP
==================  ==================================================================================

Each imports its client when it is imported itself, and none imports another.
"""
