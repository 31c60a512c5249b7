// Package latencykernel stands in for blis-latency-kernel: what its own kernel is made of.
package latencykernel

import (
	"github.com/inference-sim/blis-schemas/kernel"
	"github.com/inference-sim/blis-schemas/spec/deployment"
	"github.com/inference-sim/blis-schemas/spec/hardware"
	"github.com/inference-sim/blis-schemas/spec/model"
	"github.com/inference-sim/blis-schemas/spec/scenario"
)

// Inputs are the documents of one pool.
type Inputs struct {
	Scenario   *scenario.Scenario
	Deployment *deployment.Deployment
	PoolIndex  int
	Model      *model.Graph
	Chip       *hardware.Chip
	Fabric     *hardware.Fabric
	Devices    []*hardware.StorageDevice
}

// New makes BLIS's own kernel.
func New(in Inputs) (kernel.Kernel, error) { panic("BLIS's own kernel was asked") }
