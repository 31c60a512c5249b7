"""A burst of prompts under SGLang's policy, prefill first: what the simulator would ask.

Run it as ``python -m tests.examples.sglang``; the simulator need not be installed.
"""

import time
from statistics import mean
from types import SimpleNamespace

import fastroof
from fastroof.backends.sglang import StepTimePredictor


def batch_of(pairs: list[tuple[int, int]]) -> SimpleNamespace:
    """Make what the simulator passes: extend_length and past_kv_length, which is a decode's kv_len."""
    reqs = [SimpleNamespace(extend_length=new, past_kv_length=past) for new, past in pairs]
    return SimpleNamespace(reqs=reqs)


def serve_burst(
    predictor: StepTimePredictor, prompts: list[int], output_len: int, chunk: int
) -> tuple[list[float], list[float]]:
    """Prefill prompts in chunks of ``chunk`` tokens, then decode them together; TTFTs and ITLs, s."""
    clock_s = 0.0
    first_token_s = []
    for prompt in prompts:
        for start in range(0, prompt, chunk):
            clock_s += predictor.predict_infer_time(batch_of([(min(chunk, prompt - start), start)]))
        first_token_s.append(clock_s)
    between_s = []
    for step in range(1, output_len):
        batch = batch_of([(1, prompt + step) for prompt in prompts])
        between_s.append(predictor.predict_infer_time(batch))
    return first_token_s, between_s


if __name__ == "__main__":
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    prompts = [500 + 90 * i for i in range(32)]
    predictor = StepTimePredictor(plan)
    serve_burst(predictor, prompts, 2, 2048)
    start = time.perf_counter()
    ttft_s, itl_s = serve_burst(predictor, prompts, 256, 2048)
    wall_ms = (time.perf_counter() - start) * 1e3
    print(f"{plan.model.name} on one {plan.gpu.name}, 32 prompts at once, 256 tokens each")
    print(f"TTFT: first {ttft_s[0] * 1e3:.1f} ms, mean {mean(ttft_s) * 1e3:.1f}, last {ttft_s[-1] * 1e3:.1f}")
    print(f"ITL: {itl_s[0] * 1e3:.2f} ms at first, {itl_s[-1] * 1e3:.2f} at the end")
    print(f"{ttft_s[-1] + sum(itl_s):.2f} s of the GPU, simulated in {wall_ms:.1f} ms")
