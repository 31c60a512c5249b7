// Package sim stands in for BLIS's: three methods, 2532425e215da045967156b98bf8fc7965d7c9d1.
package sim

// LatencyModel prices the work of one instance, in us.
type LatencyModel interface {
	StepTime(batch []*Request) int64
	QueueingTime(req *Request) int64
	OutputTokenProcessingTime() int64
}

// Request is what a latency model sees of one.
type Request struct {
	InputTokens   []int
	OutputTokens  []int
	ProgressIndex int64
	NumNewTokens  int
}

// ModelHardwareConfig names the hardware of an instance.
type ModelHardwareConfig struct {
	GPU string
	TP  int
}

// LatencyCoeffs is what BLIS's own models were fitted to.
type LatencyCoeffs struct {
	AlphaCoeffs, BetaCoeffs []float64
}

// SimConfig is the configuration of an instance.
type SimConfig struct {
	ModelHardwareConfig
	LatencyCoeffs
}

// KVStore holds KV blocks.
type KVStore interface{}

// Simulator runs an instance.
type Simulator struct{ model LatencyModel }

// NewSimulator makes one of its parts.
func NewSimulator(cfg SimConfig, kvStore KVStore, latencyModel LatencyModel) (*Simulator, error) {
	return &Simulator{latencyModel}, nil
}

// Step is the time of a step.
func (s *Simulator) Step(batch []*Request) int64 { return s.model.StepTime(batch) }
