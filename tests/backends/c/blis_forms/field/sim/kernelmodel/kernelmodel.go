// Package kernelmodel stands in for BLIS's: a kernel as a latency model.
package kernelmodel

import (
	latencykernel "github.com/inference-sim/blis-latency-kernel"
	"github.com/inference-sim/blis-schemas/kernel"
)

// Model has a kernel.
type Model struct{ k kernel.Kernel }

// OpenPool makes it of a pool's documents.
func OpenPool(in latencykernel.Inputs) (*Model, error) {
	k, err := latencykernel.New(in)
	if err != nil {
		return nil, err
	}
	return newModel(k), nil
}

func newModel(k kernel.Kernel) *Model { return &Model{k} }
