// Package fastroof gives BLIS the step times of a plan that `fastroof export c` wrote.
//
// A Model is a sim.LatencyModel as github.com/inference-sim/inference-sim has it in sim/latency_model.go,
// over requests as in sim/request.go, both at commit a919bf9a8feb1c518df4c3445f27188008462fb2. In a checkout
// of it, where the export is in STEP:
//
//	mkdir sim/fastroof && cp STEP/blis/blis.go STEP/fastroof_step.[ho] sim/fastroof/
//
// and where the sim.SimConfig is made:
//
//	model, err := fastroof.Open("STEP/llama-3.1-8b.plan")
//	config.LatencyModel = model
//
// Go does not notice another fastroof_step.o: after a new export, go build -a.
package fastroof

// #cgo LDFLAGS: ${SRCDIR}/fastroof_step.o
// #include <stdlib.h>
// #include "fastroof_step.h"
import "C"

import (
	"fmt"
	"math"
	"sync"
	"unsafe"

	"github.com/inference-sim/inference-sim/sim"
)

// Model times steps by a plan; instances and goroutines may share it. A plan knows the GPU: work of the host
// takes no time unless it is set, in us, before the simulation starts.
type Model struct {
	Queueing    int64 // from a request's arrival to the queue
	OutputToken int64 // each output token, after its step
	PostDecode  int64 // each request, at its end

	plan  *C.fastroof_plan
	steps sync.Pool
}

var _ sim.LatencyModel = (*Model)(nil)

// step is what C reads and writes. It is kept: what C gets the address of, Go allocates.
type step struct {
	newTokens, contextLen []C.int64_t
	us                    C.double
}

// Open maps a plan file; simulators that open the same one share its memory.
func Open(path string) (*Model, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	m := &Model{steps: sync.Pool{New: func() any { return new(step) }}}
	if code := C.fastroof_open(name, &m.plan); code != C.FASTROOF_OK {
		return nil, fmt.Errorf("%s: %s", path, C.GoString(C.fastroof_message(code)))
	}
	return m, nil
}

// Close unmaps the plan, which must not be asked again.
func (m *Model) Close() { C.fastroof_close(m.plan) }

// Describe says in JSON what the plan is of: model, gpu, tp, dtype, runtime and more.
func (m *Model) Describe() string { return C.GoString(C.fastroof_describe(m.plan)) }

// MaxTokens is the largest MaxNumBatchedTokens that the plan serves.
func (m *Model) MaxTokens() int64 { return int64(C.fastroof_max_tokens(m.plan)) }

// MaxSeqs is the largest MaxNumSeqs that the plan serves.
func (m *Model) MaxSeqs() int64 { return int64(C.fastroof_max_seqs(m.plan)) }

// StepTime is the time of one forward pass over the batch, in us, rounded, at least 1. A request without new
// tokens takes no part in the step. There is no way to return an error: a step that the plan does not
// reach panics.
func (m *Model) StepTime(batch []*sim.Request) int64 {
	s := m.steps.Get().(*step)
	defer m.steps.Put(s)
	s.newTokens, s.contextLen = s.newTokens[:0], s.contextLen[:0]
	for _, request := range batch {
		if request.NumNewTokens != 0 {
			s.newTokens = append(s.newTokens, C.int64_t(request.NumNewTokens))
			s.contextLen = append(s.contextLen, C.int64_t(request.ProgressIndex))
		}
	}
	if len(s.newTokens) == 0 {
		return 1
	}
	code := C.fastroof_step_us(m.plan, &s.newTokens[0], &s.contextLen[0], C.int64_t(len(s.newTokens)), &s.us)
	if code != C.FASTROOF_OK {
		panic(fmt.Sprintf("fastroof: %s: %d requests, new tokens %d; exported with max_tokens=%d, max_seqs=%d",
			C.GoString(C.fastroof_message(code)), len(s.newTokens), s.newTokens, m.MaxTokens(), m.MaxSeqs()))
	}
	if us := int64(math.RoundToEven(float64(s.us))); us > 1 {
		return us
	}
	return 1
}

// QueueingTime is Queueing, of every request.
func (m *Model) QueueingTime(*sim.Request) int64 { return m.Queueing }

// OutputTokenProcessingTime is OutputToken.
func (m *Model) OutputTokenProcessingTime() int64 { return m.OutputToken }

// PostDecodeFixedOverhead is PostDecode.
func (m *Model) PostDecodeFixedOverhead() int64 { return m.PostDecode }
