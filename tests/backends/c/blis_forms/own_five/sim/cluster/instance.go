// Package cluster stands in for BLIS's: an instance builds its latency model itself.
package cluster

import (
	"fmt"

	"github.com/inference-sim/inference-sim/sim"
	"github.com/inference-sim/inference-sim/sim/latency"
)

// NewInstanceSimulator makes an instance.
func NewInstanceSimulator(id string, cfg sim.SimConfig) *sim.Simulator {
	latencyModel, err := latency.NewLatencyModel(cfg.LatencyCoeffs, cfg.ModelHardwareConfig)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", id, err))
	}
	s, err := sim.NewSimulator(cfg, nil, latencyModel)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", id, err))
	}
	return s
}
