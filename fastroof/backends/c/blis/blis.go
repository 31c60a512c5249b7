// Package fastroof gives BLIS the step times of a plan that `fastroof export c` wrote.
//
// A Model has every method that sim.LatencyModel of github.com/inference-sim/inference-sim ever had: three, four
// or five of them, by the commit. In a checkout, where the export is in STEP:
//
//	mkdir sim/fastroof && cp STEP/blis/blis.go STEP/fastroof_step.[ho] sim/fastroof/
//
// Where the model goes depends on the checkout: look for LatencyModel in the configuration of a simulation.
//
// Releases and the main branch build their own in NewInstanceSimulator (sim/cluster/instance.go, as at
// 004baea75b52d38c0c4f143b9ce8151b66f45579). There, in place of the call of latency.NewLatencyModel with all its
// arguments, and with the import of sim/fastroof in place of that of sim/latency:
//
//	latencyModel, err := fastroof.Open("STEP/llama-3.1-8b.plan")
//
// What was made for that call alone goes too, for Go refuses what is not used: adapterCost, where there is one (what
// LoRA adapters add to a step is then left out).
//
// A program that makes an instance itself gives the model to sim.NewSimulator, as its third argument. Pools that
// prefill and decode apart differ in cfg.TP and cfg.GPU there: choose the plan by them.
//
// A sim.SimConfig with LatencyModelOverride (3f95954b98e251f2e7f0edc3a4b64a82b3059f4b), where it is made, and
// one for each pool of a cluster.DeploymentConfig whose pools differ:
//
//	config.LatencyModelOverride = model
//	deployment.PrefillOverrides.LatencyModel = prefill
//	deployment.DecodeOverrides.LatencyModel = decode
//
// A sim.SimConfig with LatencyModel (a919bf9a8feb1c518df4c3445f27188008462fb2, in no release), its pools as above:
//
//	config.LatencyModel = model
//
// Speculative decoding: a request does not say how many tokens it verifies, for NumNewTokens counts those that were
// accepted. The simulation does, in its SpeculativeConfig: set DraftTokens to that K.
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
	Scheduling  int64 // each request, where the interface asks for it
	Preemption  int64 // each eviction, where the interface asks for it

	// DraftTokens is what each decoding request verifies beside its own next token. The draft model's time
	// is not in a plan's.
	DraftTokens int64

	plan  *C.fastroof_plan
	steps sync.Pool
}

var _ sim.LatencyModel = (*Model)(nil)

// step is what C reads and writes. It is kept: what C gets the address of, Go allocates.
type step struct {
	newTokens, contextLen []C.int64_t
	us                    C.double
}

// room makes room for a batch.
func (s *step) room(size int) {
	if size > len(s.newTokens) {
		s.newTokens, s.contextLen = make([]C.int64_t, 2*size), make([]C.int64_t, 2*size)
	}
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

// Describe says in JSON what the plan is of: model, gpu, tp, dtype, engine and more.
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
	s.room(len(batch))
	us := 0.0
	if m.DraftTokens > 0 {
		us = m.verified(s, batch)
	} else {
		us = m.plain(s, batch)
	}
	return max64(1, int64(math.RoundToEven(us)))
}

// plain is a step in which each request has the new tokens that it names.
func (m *Model) plain(s *step, batch []*sim.Request) float64 {
	count := 0
	newTokens, contextLen := s.newTokens[:len(batch)], s.contextLen[:len(batch)]
	for _, request := range batch {
		if request.NumNewTokens != 0 {
			newTokens[count] = C.int64_t(request.NumNewTokens)
			contextLen[count] = C.int64_t(request.ProgressIndex)
			count++
		}
	}
	return m.stepOf(s, count)
}

// verified is a step in which decodes, that is requests after their prompt, verify DraftTokens and one. Beside
// prompts it is the step with one token each, and what verification adds to these decodes alone.
func (m *Model) verified(s *step, batch []*sim.Request) float64 {
	count, decodes, context := 0, 0, 0.0
	for _, request := range batch {
		if request.NumNewTokens == 0 {
			continue
		}
		s.newTokens[count], s.contextLen[count] = C.int64_t(request.NumNewTokens), C.int64_t(request.ProgressIndex)
		if int64(request.ProgressIndex) >= int64(len(request.InputTokens)) {
			s.newTokens[count] = 1
			decodes++
			context += float64(request.ProgressIndex)
		}
		count++
	}
	if decodes == 0 {
		return m.stepOf(s, count)
	}
	size, tokens := C.int64_t(decodes), C.int64_t(m.DraftTokens+1)
	before := C.int64_t(math.RoundToEven(context / float64(decodes)))
	m.check(C.fastroof_verify_us(m.plan, size, before+tokens, tokens, &s.us), s, count)
	us := float64(s.us)
	if decodes < count {
		m.check(C.fastroof_decode_us(m.plan, size, before+1, &s.us), s, count)
		us -= float64(s.us)
		us += m.stepOf(s, count)
	}
	return us
}

func (m *Model) stepOf(s *step, count int) float64 {
	if count == 0 {
		return 0
	}
	m.check(C.fastroof_step_us(m.plan, &s.newTokens[0], &s.contextLen[0], C.int64_t(count), &s.us), s, count)
	return float64(s.us)
}

func (m *Model) check(code C.int32_t, s *step, count int) {
	if code != C.FASTROOF_OK {
		panic(fmt.Sprintf("fastroof: %s: %d requests, new tokens %d, draft tokens %d; exported with "+
			"max_num_batched_tokens=%d, max_num_seqs=%d", C.GoString(C.fastroof_message(code)), count, s.newTokens[:count],
			m.DraftTokens, m.MaxTokens(), m.MaxSeqs()))
	}
}

func max64(a, b int64) int64 {
	if a > b {
		return a
	}
	return b
}

// QueueingTime is Queueing, of every request.
func (m *Model) QueueingTime(*sim.Request) int64 { return m.Queueing }

// OutputTokenProcessingTime is OutputToken.
func (m *Model) OutputTokenProcessingTime() int64 { return m.OutputToken }

// PostDecodeFixedOverhead is PostDecode.
func (m *Model) PostDecodeFixedOverhead() int64 { return m.PostDecode }

// SchedulingProcessingTime is Scheduling.
func (m *Model) SchedulingProcessingTime() int64 { return m.Scheduling }

// PreemptionProcessingTime is Preemption.
func (m *Model) PreemptionProcessingTime() int64 { return m.Preemption }
