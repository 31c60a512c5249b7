// Package sim stands in for the package of this name in github.com/inference-sim/inference-sim (BLIS): of its
// sim/latency_model.go, sim/request.go and sim/config.go at commit a919bf9a8feb1c518df4c3445f27188008462fb2
// it has what a latency model sees, under the same names and types.
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

// Request is one request: what it asks for, how far it is, what the next step does of it.
type Request struct {
	ID            string
	InputTokens   []TokenID
	OutputTokens  []TokenID
	ArrivalTime   int64
	ProgressIndex int64 // tokens in the KV cache
	NumNewTokens  int   // of the step that is being priced
	ITL           []int64
	DepartureTime int64
}

// InputLen is the length of the prompt.
func (req *Request) InputLen() int64 { return int64(len(req.InputTokens)) }

// SimConfig holds the limits of a step, and the model that prices it.
type SimConfig struct {
	MaxNumSeqs          int64
	MaxNumBatchedTokens int64
	LatencyModel        LatencyModel
}
