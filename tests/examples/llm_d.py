"""A configuration for llm-d-inference-sim, and how near its formula comes, load by load.

Run it as ``python -m tests.examples.llm_d``.
"""

from __future__ import annotations

import fastroof
from fastroof.backends.llm_d import fit_llm_d, llm_d_yaml


def main() -> None:
    """Fit a plan over some loads, print the file, and the fit compared with the plan."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    fit = fit_llm_d(plan, clients=[1, 4, 16, 64], isl=[512, 2048], osl=[256])
    print(llm_d_yaml(plan, fit))
    print("clients   isl   TTFT ms: plan  simulator   ITL ms: plan  simulator")
    for row in zip(
        fit.clients, fit.isl, fit.ttft_ms, fit.simulated_ttft_ms, fit.tpot_ms, fit.simulated_tpot_ms,
        strict=True,
    ):  # fmt: skip
        print("{:11.0f} {:5.0f} {:15.2f} {:10.0f} {:14.2f} {:10.0f}".format(*row))


if __name__ == "__main__":
    main()
