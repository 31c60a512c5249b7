// Package sim stands in for BLIS's: LatencyModel of its configuration, a919bf9a8feb1c518df4c3445f27188008462fb2.
package sim

// TokenID numbers a token.
type TokenID int32

// LatencyModel prices the work of one instance, in us.
type LatencyModel interface {
	StepTime(batch []*Request) int64
	QueueingTime(req *Request) int64
	OutputTokenProcessingTime() int64
	PostDecodeFixedOverhead() int64
}

// Request is what a latency model sees of one.
type Request struct {
	InputTokens   []TokenID
	OutputTokens  []TokenID
	ProgressIndex int64
	NumNewTokens  int
}

// ModelHardwareConfig names the model and hardware of an instance.
type ModelHardwareConfig struct {
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

// SpeculativeConfig is how many tokens are drafted.
type SpeculativeConfig struct {
	K int
}

// SimConfig is the configuration of an instance.
type SimConfig struct {
	ModelHardwareConfig
	SpeculativeConfig
	LatencyCoeffs
	LatencyModel LatencyModel
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
