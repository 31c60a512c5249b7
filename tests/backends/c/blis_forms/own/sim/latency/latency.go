// Package latency stands in for BLIS's own models.
package latency

import "github.com/inference-sim/inference-sim/sim"

// NewLatencyModel makes one of coefficients.
func NewLatencyModel(coeffs sim.LatencyCoeffs, hw sim.ModelHardwareConfig) (sim.LatencyModel, error) {
	panic("BLIS's own model was asked")
}
