// Package cluster stands in for BLIS's: an instance takes its latency model from its configuration.
package cluster

import "github.com/inference-sim/inference-sim/sim"

// PoolOverrides is what one pool has otherwise.
type PoolOverrides struct {
	TP           *int
	LatencyModel sim.LatencyModel
}

// DeploymentConfig is the configuration of a cluster.
type DeploymentConfig struct {
	sim.SimConfig
	PrefillOverrides, DecodeOverrides PoolOverrides
}

// ResolvePoolConfig is a pool's own configuration.
func ResolvePoolConfig(global sim.SimConfig, overrides PoolOverrides) sim.SimConfig {
	if overrides.LatencyModel != nil {
		global.LatencyModel = overrides.LatencyModel
	}
	return global
}

// NewInstanceSimulator makes an instance.
func NewInstanceSimulator(cfg sim.SimConfig) *sim.Simulator {
	s, err := sim.NewSimulator(cfg, nil, cfg.LatencyModel)
	if err != nil {
		panic(err)
	}
	return s
}
