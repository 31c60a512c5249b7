// Package sim stands in for BLIS's: f90a1e3a6787da17c2cd463dab6fb2660b1b1760.
package sim

// LatencyModel prices the work of one instance, in us.
type LatencyModel interface {
	StepTime(batch []*Request) int64
	QueueingTime(req *Request) int64
	OutputTokenProcessingTime() int64
	PostDecodeFixedOverhead() int64
}

// Request is what a latency model sees of one.
type Request struct {
	InputTokens   []int
	OutputTokens  []int
	ProgressIndex int64
	NumNewTokens  int
}

// ModelConfig is a model's shape.
type ModelConfig struct {
	NumLayers           int
	BytesPerParam       float64
	NumLocalExperts     int
	WeightBytesPerParam float64
}

// BatchConfig is the limits of a step.
type BatchConfig struct {
	MaxNumSeqs          int64
	MaxNumBatchedTokens int64
}

// LoRAConfig names the adapters of a model.
type LoRAConfig struct{ Adapters []string }

// ModelHardwareConfig names the model and hardware of an instance.
type ModelHardwareConfig struct {
	ModelConfig          ModelConfig
	Model                string
	GPU                  string
	TP                   int
	DP                   int
	EnableExpertParallel bool
}

// LatencyCoeffs is what BLIS's own models were fitted to.
type LatencyCoeffs struct {
	AlphaCoeffs, BetaCoeffs []float64
}

// SimConfig is the configuration of an instance.
type SimConfig struct {
	BatchConfig
	ModelHardwareConfig
	LatencyCoeffs
	LoRAConfig
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
