"""A plan's arena is finite and its times are times, or there is no plan."""

import numpy as np
import pytest

import fastroof
from fastroof.compiled import steps
from fastroof.compiled.grids import cells_of
from fastroof.errors import PlanError
from fastroof.plan.arena import MOST_US, validate_arena
from fastroof.plan.curves import TableCurves

TABLES = fastroof.load_tables("h100")
PLANS = {
    name: fastroof.compile_plan(
        name, "h100", TABLES, max_num_batched_tokens=256, max_num_seqs=64, engine="vllm"
    )
    for name in ("llama-3.1-8b", "gemma-3-12b")
}
ROWS = {steps.TOKENS_AT: "each token", steps.DECODE_TOKENS_AT: "each token", steps.LOGITS_AT: "each sequence"}
BLOCKS = {
    steps.DECODE_AT: "decode attention",
    steps.PREFILL_AT: "prefill attention",
    steps.WINDOW_DECODE_AT: "decode attention",
    steps.WINDOW_PREFILL_AT: "prefill attention",
}
NUMBERS = {
    steps.STEP_US: "adds to a step",
    steps.SEQUENCE_US: "adds to a sequence",
    steps.PREFILL_US: "adds to a step with prefill",
    steps.PREFILL_FLOOR_US: "least time",
    steps.PREFIX_PAIR_US: "a pair of tokens",
    steps.PREFIX_TOKEN_US: "a token of a prefix",
    steps.MIXED_KV_US: "a KV token",
}
NO_TIMES = (np.nan, np.inf, -np.inf, 1e308, -1e308)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("time_us", NO_TIMES)
@pytest.mark.parametrize("slot", [*ROWS, *BLOCKS, *NUMBERS])
def test_an_invalid_time_is_refused_with_its_part(slot, time_us, name):
    arena = PLANS[name].arena.copy()
    validate_arena(arena, "it")
    start, words = int(arena[slot]), "finite"
    if slot in ROWS:
        arena[start + 7], words = time_us, ROWS[slot]
    elif slot in NUMBERS:
        arena[slot], words = time_us, NUMBERS[slot]
    else:
        block = arena[start:]
        block[cells_of(block)][6:12] = time_us
        words = BLOCKS[slot]
    with pytest.raises(PlanError, match=rf"^it: .*{words}.* takes"):
        validate_arena(arena, "it")


@pytest.mark.parametrize("name", PLANS)
def test_no_number_of_an_arena_may_be_infinite(name):
    arena = PLANS[name].arena.copy()
    for at in np.random.default_rng(1).integers(steps.HEADER_SIZE, len(arena), 50):
        broken = arena.copy()
        broken[at] = np.nan
        with pytest.raises(PlanError):
            validate_arena(broken, "it")


def test_corrections_may_be_below_0_and_what_runs_takes_a_time():
    arena = PLANS["llama-3.1-8b"].arena.copy()
    arena[steps.STEP_US] = -MOST_US
    validate_arena(arena, "it")
    arena[int(arena[steps.TOKENS_AT]) + 1] = 0.0
    with pytest.raises(PlanError, match="what runs for each token takes 0 us"):
        validate_arena(arena, "it")


def test_the_invalid_time_is_the_one_that_is_named():
    """Valid times stay unnamed: a stage without the LM head has nothing for a sequence."""
    arena = PLANS["llama-3.1-8b"].arena.copy()
    sequences = arena[int(arena[steps.LOGITS_AT]) :][: PLANS["llama-3.1-8b"].max_num_seqs + 1]
    sequences[:] = 0.0
    validate_arena(arena, "it")
    sequences[7] = np.inf
    with pytest.raises(PlanError, match="what runs for each sequence takes inf us, must be 0 to"):
        validate_arena(arena, "it")
    sequences[3] = -5.0
    with pytest.raises(PlanError, match="what runs for each sequence takes -5 us, must be 0 to"):
        validate_arena(arena, "it")


class Scaled(TableCurves):
    """Measured tables whose latencies are so many times as long, of rows or of attention."""

    factor = 1.0
    is_attention = False

    def row_values(self, call, max_rows):
        values, origin = super().row_values(call, max_rows)
        return (values if self.is_attention else values * self.factor), origin

    def attention_block(self, attention):
        block = super().attention_block(attention).copy()
        if self.is_attention:
            block[cells_of(block)] *= self.factor
        return block


@pytest.mark.parametrize("is_attention", [False, True])
@pytest.mark.parametrize("factor", [1e300, np.inf, np.nan, -1.0])
def test_a_plan_whose_kernels_take_no_times_is_not_made(factor, is_attention):
    class Curves(Scaled):
        pass

    Curves.factor, Curves.is_attention = factor, is_attention
    with pytest.raises(PlanError, match=r"the plan of llama-3.1-8b on h100"), np.errstate(all="ignore"):
        fastroof.compile_plan("llama-3.1-8b", "h100", TABLES, curves=Curves(TABLES), engine="kernels")
