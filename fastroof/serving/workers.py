"""Workers that prefill and workers that decode: what they hold, and what they send each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fastroof.compiled import disaggregated as loops
from fastroof.errors import PlanError
from fastroof.serving.scenarios import EngineLimits, at_least
from fastroof.serving.speculation import SpeculatedPlan, SpeculativeDecoding, speculated
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["Workers"]


class Workers(NamedTuple):
    """Plans of both kinds of workers, and both as loops read them."""

    prefill: StepPlan
    decode: StepPlan
    prefill_loops: SpeculatedPlan
    decode_loops: SpeculatedPlan

    @classmethod
    def of(cls, prefill: StepPlan, decode: StepPlan, speculation: SpeculativeDecoding | None) -> Workers:
        """Check that the plans go together, and lay them out."""
        model = prefill.model
        if (model, prefill.kv_dtype) != (decode.model, decode.kv_dtype):
            raise PlanError(
                f"prefill and decode need one model and kv_dtype, got {model.name} with {prefill.kv_dtype} "
                f"KV and {decode.model.name} with {decode.kv_dtype} KV"
            )
        return cls(prefill, decode, speculated(prefill, speculation), speculated(decode, speculation))

    def transfer_us_per_token(self, link_bytes_per_s: float | None) -> float:
        """Time that the KV cache of a token takes from one worker to the other, us."""
        prefill, decode = self.prefill, self.decode
        if link_bytes_per_s is None:
            link_bytes_per_s = min(plan.gpu.nvlink_bytes_per_s for plan in (prefill, decode))
        rate = at_least("link_bytes_per_s", link_bytes_per_s, 1) * min(
            plan.tp * plan.layout.pp for plan in (prefill, decode)
        )
        return self.decode_loops.whole_kv_bytes().token_bytes / rate * US_PER_S

    def options(
        self, link_bytes_per_s: float | None, prefill_engine: EngineLimits, decode_engine: EngineLimits
    ) -> loops.LinkOptions:
        """What all scenarios have in common."""
        prefill, decode = (
            one.memory(max_seqs=decode_engine.max_seqs) for one in (self.prefill_loops, self.decode_loops)
        )
        sent = self.decode_loops.whole_kv_bytes()
        return loops.LinkOptions(
            prefill_kv_tokens=prefill.max_kv_tokens / self.prefill.layout.pp,
            decode_kv_tokens=decode.max_kv_tokens / self.decode.layout.pp,
            max_seqs=decode_engine.max_seqs,
            osl_reserved=decode_engine.osl_reserved,
            is_chunked=prefill_engine.is_chunked,
            transfer_us_per_token=self.transfer_us_per_token(link_bytes_per_s),
            window=float(decode.window),
            prefill_window_share=prefill.window_share,
            decode_window_share=decode.window_share,
            transfer_window_share=sent.window_share,
            prefill_state_tokens=prefill.state_tokens,
            decode_state_tokens=decode.state_tokens,
            transfer_state_tokens=sent.state_tokens,
        )
