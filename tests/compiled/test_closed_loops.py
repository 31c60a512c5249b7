"""The search for the clients that make a rate: whatever latency does, as many trials as halving takes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from fastroof.compiled import closed_loops
from fastroof.compiled.expert_rows import ONE_RANK
from fastroof.compiled.serving_options import NO_FRONT_END

pytestmark = pytest.mark.loops


@pytest.mark.parametrize("jump", [3.0, 10.0, 33.3, 1000.0])
@pytest.mark.parametrize("times", [1.01, 10.0, 100.0])
def test_a_rate_within_a_jump_is_found_by_halving_at_the_least(
    jump: float, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = closed_loops.new_scratch()
    most, seen = 1e4, []

    def latency_us(clients: float) -> float:
        # less beyond the jump: measured kernels are jagged
        return (10.0 + 2.0 * clients**0.99) * (times if clients < jump else 1.0)

    def closed_loop(arena: Any, sizes: Any, clients: float, options: Any, filled: Any) -> int:
        seen.append(clients)
        filled.mean[closed_loops.MEAN_REQUEST_US] = latency_us(clients)
        return closed_loops.FEASIBLE

    monkeypatch.setattr(closed_loops, "closed_loop", closed_loop)
    monkeypatch.setattr(closed_loops, "_most_clients", lambda *arguments: most)
    monkeypatch.setattr(closed_loops, "open_plan", lambda arena: None)
    monkeypatch.setattr(closed_loops, "open_speculation", lambda *arguments: SimpleNamespace(tokens=1.0))
    solve: Any = getattr(closed_loops.solve_rate, "py_func", closed_loops.solve_rate)
    # a little more than what is made right below the jump
    rate = jump / (latency_us(jump) * times**0.999)
    alone = SimpleNamespace(front_end=NO_FRONT_END, is_disaggregated=False, batches=1.0, rules=ONE_RANK)
    code, clients = solve(None, SimpleNamespace(isl=1.0), rate, alone, scratch)
    assert code == closed_loops.FEASIBLE
    assert jump <= clients == pytest.approx(jump, rel=2 * closed_loops.CLOSE)
    # after one client and the most, clients rise up to enough; from then on every third trial halves
    enough = next(i for i in range(2, len(seen)) if seen[i] >= jump)
    apart = 1.0 - seen[enough - 1] / seen[enough]
    halvings = math.ceil(math.log2(apart / closed_loops.CLOSE))
    # and a last one where they end on the near side
    assert len(seen) - enough - 1 <= 3 * halvings + 4
