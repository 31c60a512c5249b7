// Package kernel stands in for that of blis-schemas: what a simulator asks of a cost model.
package kernel

import (
	"time"

	"github.com/inference-sim/blis-schemas/spec/deployment"
)

// Kernel prices one pool.
type Kernel interface {
	FixedBytes() MemoryBreakdown
	SequenceFixedBytes() int64
	SequenceVariableBytes(tokens int) int64
	StepTime(Batch) StepEstimate
	TierTime(tier string, dir Direction, bytes int64, queueDepth int) time.Duration
	PDTransferTime(tokens int, from, to Placement) time.Duration
	AdmissionOverhead(promptTokens int) time.Duration
	OutputTokenOverhead() time.Duration
	CompletionOverhead() time.Duration
	Provenance() []CoefficientOrigin
	Resolved() Resolution
	Deployment() deployment.Pool
}

// MemoryBreakdown is what a GPU holds besides KV cache.
type MemoryBreakdown struct {
	Weights        int64
	ActivationPeak int64
	CUDAGraph      int64
	EPLBRedundant  int64
	CommBuffers    int64
}

// Total is all of it.
func (m MemoryBreakdown) Total() int64 {
	return m.Weights + m.ActivationPeak + m.CUDAGraph + m.EPLBRedundant + m.CommBuffers
}

// Resource is what a step can wait for.
type Resource string

// StepEstimate is the time of a step, between two edges.
type StepEstimate struct {
	Overlap     time.Duration
	NoOverlap   time.Duration
	Bottleneck  Resource
	PerResource map[Resource]time.Duration
}

// Batch is a step.
type Batch struct {
	Reqs            []ReqShape
	DecodeThreshold int
	SMBudget        int
}

// ReqShape is one request of a step.
type ReqShape struct {
	Scheduled    int
	Computed     int
	PromptLen    int
	CachedTokens int
}

// Direction is that of a transfer.
type Direction string

const (
	DirectionToTier   Direction = "to_tier"
	DirectionFromTier Direction = "from_tier"
)

// Placement is where a rank is.
type Placement struct {
	Node int
	Rack int
	Pool deployment.Role
}

// CoefficientOrigin is where a number comes from.
type CoefficientOrigin struct {
	Name   string
	Set    string
	Method string
	Scope  string
}

// Resolution is the layout that runs.
type Resolution struct {
	TensorParallelWidth int
	DataParallelWidth   int
	ExpertParallelWidth int
	AllReduceBackend    string
	AsyncScheduling     bool
}
