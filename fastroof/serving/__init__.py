"""Serving estimates: TTFT, TPOT and throughput of serving engines in steady state."""

from fastroof.plan.speculation import SpeculativeDecoding, mtp_draft
from fastroof.serving.disaggregated import DisaggregatedEstimate, estimate_disaggregated
from fastroof.serving.engine_start import fit
from fastroof.serving.estimate import estimate
from fastroof.serving.fit_answer import Fit
from fastroof.serving.images import estimate_with_images
from fastroof.serving.largest_sizes import LargestSize
from fastroof.serving.serving_estimate import ServingEstimate

__all__ = [
    "DisaggregatedEstimate",
    "Fit",
    "LargestSize",
    "ServingEstimate",
    "SpeculativeDecoding",
    "estimate",
    "estimate_disaggregated",
    "estimate_with_images",
    "fit",
    "mtp_draft",
]
