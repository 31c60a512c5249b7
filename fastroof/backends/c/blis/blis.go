// Package fastroof gives BLIS the step times of a plan that `fastroof export c` wrote. It refuses a plan of another
// deployment than BLIS's configuration describes.
//
// A Model is a sim.LatencyModel of github.com/inference-sim/inference-sim since v0.6.9. In a checkout, with the
// export in the folder $STEP:
//
//	mkdir sim/fastroof && cp $STEP/blis/blis.go $STEP/fastroof_step.[ho] sim/fastroof/
//
// Where the model goes depends on the checkout: look for LatencyModel in the configuration of a simulation.
//
// Releases, and main until August 2026, build their own in NewInstanceSimulator (sim/cluster/instance.go, as at
// f90a1e3a6787da17c2cd463dab6fb2660b1b1760). There, in place of the call of latency.NewLatencyModel with all its
// arguments, and with the import of sim/fastroof in place of that of sim/latency:
//
//	latencyModel, err := fastroof.Open("$STEP/llama-3.1-8b.plan", cfg)
//
// Delete what was made for that call alone, too: adapterCost, if there is one. Pools that prefill and decode apart
// differ in cfg.TP and cfg.GPU: choose the plan by them.
//
// These compute the number of KV blocks themselves: --total-kv-blocks takes the plan's, memory.blocks of Describe.
//
// Main since then takes step times, memory, host times and transfers from a kernel.Kernel of blis-schemas (as at
// a919bf9a8feb1c518df4c3445f27188008462fb2): see kernel.go next to this file. A program of yours that makes a
// sim.SimConfig or a cluster.DeploymentConfig itself gives it a Model:
//
//	config.LatencyModel = model
//	deployment.PrefillOverrides.LatencyModel = prefill
//	deployment.DecodeOverrides.LatencyModel = decode
//
// Go does not notice another fastroof_step.o: after a new export, go build -a.
package fastroof

// #cgo LDFLAGS: ${SRCDIR}/fastroof_step.o
// #include <stdlib.h>
// #include "fastroof_step.h"
import "C"

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"unsafe"

	"github.com/inference-sim/inference-sim/sim"
)

// Model times steps by a plan; instances and goroutines may share it. Set its fields before the simulation starts.
type Model struct {
	// Host time from a request's arrival to the queue, and for each token of its prompt, us. By default those of the
	// plan's API server; 0 for the engine "kernels" and for plans without a front end.
	Request, PromptToken float64

	// Host time for each output token, after its step, and at the end of each request, us. A plan's steps include
	// both, so they are 0 by default.
	OutputToken, PostDecode int64

	// DraftTokens is the number of tokens that each decoding request verifies in addition to its next one; by default
	// K of BLIS's SpeculativeConfig, if it has one. (A request's NumNewTokens counts accepted tokens only.) The draft
	// model's time is not included.
	DraftTokens int64

	plan  *C.fastroof_plan
	file  string
	facts facts
	steps sync.Pool
	log   *os.File
}

var _ sim.LatencyModel = (*Model)(nil)

// facts is the description of a plan in its file.
type facts struct {
	Name, Model, GPU, Dtype, Engine, Kernels, Lora, Method, Version string
	KVDtype                                                         string `json:"kv_dtype"`
	IDs                                                             string `json:"ids"` // of the model, on Hugging Face
	MaxTokens                                                       int64  `json:"max_num_batched_tokens"`
	MaxSeqs                                                         int64  `json:"max_num_seqs"`
	Tables                                                          string `json:"tables_hash"`
	Layout                                                          struct{ TP, PP, DP, EP, CP int64 }
	Memory                                                          map[string]int64
	Stages                                                          []struct{ Layers int64 }
	FrontEnd                                                        struct {
		Request int64 `json:"request_ns"`
		Server  int64 `json:"server_ns"`
		Token   int64 `json:"token_ns"`
	} `json:"front_end"`
}

// served is a deployment by BLIS's configuration; empty and 0 mean unknown.
type served struct {
	model, gpu, kvDtype                      string
	weightBytes                              float64
	layers, tp, pp, dp, ep, cp, tokens, seqs int64
	adapters                                 bool
}

// weightBytes has the bytes of a weight by format: all that BLIS knows of formats.
var weightBytes = map[string]float64{"bf16": 2, "fp8": 1, "fp8_block": 1, "mxfp8": 1, "int8": 1, "int8_wo": 1,
	"int4_wo": 0.5, "w4afp8": 0.5, "nvfp4": 0.5, "nvfp4_wo": 0.5, "mxfp4": 0.5}

// Open maps a plan file for an instance with this configuration, and expands environment variables in its path. It
// returns an error if the plan is of another model, GPU, layout or format, or of smaller steps. Simulators that open
// the same file share its memory. If $FASTROOF_STEPS is the path of a file, each step appends a line to it: its us,
// then NEW@CONTEXT of its requests.
func Open(path string, cfg sim.SimConfig) (*Model, error) {
	m, err := openPlan(path)
	if err != nil {
		return nil, err
	}
	config := reflect.ValueOf(cfg)
	of := served{model: text(config, "Model"), gpu: text(config, "GPU"), tp: number(config, "TP"), pp: 1, cp: 1,
		dp: max64(1, number(config, "DP")), ep: 1, layers: number(config, "ModelConfig", "NumLayers"),
		tokens: number(config, "MaxNumBatchedTokens") + number(config, "MaxScheduledTokens"),
		seqs:   number(config, "MaxNumSeqs") + number(config, "MaxRunningReqs")}
	if number(config, "ModelConfig", "NumLocalExperts") > 1 && field(config, "EnableExpertParallel").IsValid() &&
		field(config, "EnableExpertParallel").Bool() {
		of.ep = of.tp * of.dp
	}
	for _, name := range []string{"BytesPerParam", "WeightBytesPerParam"} {
		if bytes := field(config, "ModelConfig", name); bytes.IsValid() && bytes.Float() > 0 {
			of.weightBytes = bytes.Float()
		}
	}
	adapters := field(config, "Adapters")
	of.adapters = adapters.IsValid() && adapters.Len() > 0
	if err := m.refuse(of); err != nil {
		return nil, err
	}
	if of.dp > 1 { // a batch of BLIS's has the requests of all ranks
		return nil, m.closed("times the steps of one rank, but BLIS's batches hold the requests of all %d: use dp 1", of.dp)
	}
	m.DraftTokens = number(config, "SpeculativeConfig", "K")
	return m, nil
}

// field returns a field of a configuration by its path; the zero Value if this commit of BLIS has no such field.
func field(config reflect.Value, names ...string) reflect.Value {
	for _, name := range names {
		if config = config.FieldByName(name); !config.IsValid() {
			break
		}
	}
	return config
}

func number(config reflect.Value, names ...string) int64 {
	if found := field(config, names...); found.IsValid() {
		return found.Int()
	}
	return 0
}

func text(config reflect.Value, name string) string {
	if found := field(config, name); found.IsValid() {
		return found.String()
	}
	return ""
}

func openPlan(path string) (*Model, error) {
	path = os.ExpandEnv(path)
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	m := &Model{file: filepath.Base(path), steps: sync.Pool{New: func() any { return new(step) }}}
	if code := C.fastroof_open(name, &m.plan); code != C.FASTROOF_OK {
		return nil, fmt.Errorf("%s: %s", path, C.GoString(C.fastroof_message(code)))
	}
	if err := json.Unmarshal([]byte(m.Describe()), &m.facts); err != nil {
		return nil, m.closed("has no valid description (%v): export it again", err)
	}
	m.Request = float64(m.facts.FrontEnd.Request+m.facts.FrontEnd.Server) / 1e3
	m.PromptToken = float64(m.facts.FrontEnd.Token) / 1e3
	if steps := os.Getenv("FASTROOF_STEPS"); steps != "" {
		var err error
		if m.log, err = os.OpenFile(steps, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644); err != nil {
			return nil, m.closed("%v", err)
		}
	}
	return m, nil
}

// closed closes a model that cannot be used, and returns the reason.
func (m *Model) closed(format string, values ...any) error {
	m.Close()
	return fmt.Errorf("%s "+format, append([]any{m.file}, values...)...)
}

// refuse closes the model and returns an error of one line if its plan is not of this deployment.
func (m *Model) refuse(of served) error {
	f, differences := &m.facts, []string(nil)
	differs := func(what string, theirs, ours any) {
		differences = append(differences, fmt.Sprintf("%s %v (BLIS: %v)", what, ours, theirs))
	}
	if !isNamed(of.model, f.Model, f.Name, f.IDs) {
		differs("model", of.model, f.Model)
	}
	if of.gpu != "" && gpuName(of.gpu) != gpuName(f.GPU) {
		differs("GPU", of.gpu, f.GPU)
	}
	layers := int64(0)
	for _, stage := range f.Stages {
		layers += stage.Layers
	}
	for _, one := range []struct {
		what         string
		theirs, ours int64
	}{{"layers", of.layers, layers}, {"tp", of.tp, f.Layout.TP}, {"pp", of.pp, f.Layout.PP},
		{"dp", of.dp, f.Layout.DP}, {"ep", of.ep, f.Layout.EP}, {"cp", of.cp, f.Layout.CP}} {
		if one.theirs != 0 && one.theirs != one.ours {
			differs(one.what, one.theirs, one.ours)
		}
	}
	if bytes := weightBytes[f.Dtype]; of.weightBytes != 0 && bytes != of.weightBytes {
		differs("dtype", fmt.Sprintf("%g bytes a weight", of.weightBytes), f.Dtype)
	}
	if of.kvDtype != "" && of.kvDtype != f.KVDtype {
		differs("KV cache", of.kvDtype, f.KVDtype)
	}
	if of.tokens > f.MaxTokens {
		differs("max_num_batched_tokens", of.tokens, f.MaxTokens)
	}
	if of.seqs > f.MaxSeqs {
		differs("max_num_seqs", of.seqs, f.MaxSeqs)
	}
	if has := f.Lora != ""; of.adapters != has {
		differs("LoRA adapters", of.adapters, has)
	}
	if differences == nil {
		return nil
	}
	return m.closed("is of another deployment: %s; `fastroof export c` writes a plan of BLIS's",
		strings.Join(differences, ", "))
}

// isNamed reports whether BLIS's name of a model is one of these: the model's, that of the export, an id.
func isNamed(theirs string, ours ...string) bool {
	known := strings.Split(strings.Join(ours, ", "), ", ")
	for _, name := range known {
		if theirs == "" || name != "" && strings.EqualFold(filepath.Base(theirs), filepath.Base(name)) {
			return true
		}
	}
	return false
}

// gpuName returns a GPU's name without its usual suffixes: BLIS's A100-SXM and A100-80 are fastroof's a100.
func gpuName(name string) string {
	name = strings.NewReplacer("-", "_", " ", "_").Replace(strings.ToLower(name))
	for _, more := range []string{"gb", "_80", "_nvl72", "_sxm5", "_sxm4", "_sxm"} {
		name = strings.TrimSuffix(name, more)
	}
	return name
}

// Close unmaps the plan, which must not be used after it.
func (m *Model) Close() {
	C.fastroof_close(m.plan)
	if m.log != nil {
		m.log.Close()
	}
}

// Describe returns the plan's description as JSON: model, gpu, tp, dtype, engine and more.
func (m *Model) Describe() string { return C.GoString(C.fastroof_describe(m.plan)) }

// MaxTokens returns the largest MaxNumBatchedTokens that the plan serves.
func (m *Model) MaxTokens() int64 { return int64(C.fastroof_max_tokens(m.plan)) }

// MaxSeqs returns the largest MaxNumSeqs that the plan serves.
func (m *Model) MaxSeqs() int64 { return int64(C.fastroof_max_seqs(m.plan)) }

// step is what C reads and writes. Steps are reused, because Go allocates whatever C gets the address of.
type step struct {
	newTokens, contextLen []C.int64_t
	us                    C.double
	count, decodes        int
	context               float64 // sum over the decodes that verify draft tokens
}

// empty starts a step, with room for a batch.
func (s *step) empty(size int) {
	if size > len(s.newTokens) {
		s.newTokens, s.contextLen = make([]C.int64_t, 2*size), make([]C.int64_t, 2*size)
	}
	s.count, s.decodes, s.context = 0, 0, 0
}

// add adds a request, unless it has no new tokens.
func (s *step) add(newTokens, contextLen int64, verifies bool) {
	if newTokens == 0 {
		return
	}
	if verifies {
		newTokens = 1
		s.decodes++
		s.context += float64(contextLen)
	}
	s.newTokens[s.count], s.contextLen[s.count] = C.int64_t(newTokens), C.int64_t(contextLen)
	s.count++
}

// StepTime returns the time of one forward pass over the batch, us, rounded, at least 1. It panics if the step is
// larger than the plan's, since it cannot return an error.
func (m *Model) StepTime(batch []*sim.Request) int64 {
	s := m.steps.Get().(*step)
	defer m.steps.Put(s)
	s.empty(len(batch))
	for _, request := range batch {
		s.add(int64(request.NumNewTokens), int64(request.ProgressIndex),
			m.DraftTokens > 0 && int64(request.ProgressIndex) >= int64(len(request.InputTokens)))
	}
	return max64(1, int64(math.RoundToEven(m.us(s))))
}

// us returns the time of a step. Decodes that verify draft tokens next to prompts take the step with one token each,
// plus what verification adds to these decodes alone.
func (m *Model) us(s *step) float64 {
	us := 0.0
	if s.decodes > 0 {
		size, tokens := C.int64_t(s.decodes), C.int64_t(m.DraftTokens+1)
		before := C.int64_t(math.RoundToEven(s.context / float64(s.decodes)))
		m.check(C.fastroof_verify_us(m.plan, size, before+tokens, tokens, &s.us), s)
		us = float64(s.us)
		if s.decodes < s.count {
			m.check(C.fastroof_decode_us(m.plan, size, before+1, &s.us), s)
			us -= float64(s.us)
		}
	}
	if s.decodes < s.count {
		m.check(C.fastroof_step_us(m.plan, &s.newTokens[0], &s.contextLen[0], C.int64_t(s.count), &s.us), s)
		us += float64(s.us)
	}
	if m.log != nil {
		line := fmt.Appendf(nil, "%v", us)
		for i := 0; i < s.count; i++ {
			line = fmt.Appendf(line, " %d@%d", s.newTokens[i], s.contextLen[i])
		}
		m.log.Write(append(line, '\n'))
	}
	return us
}

func (m *Model) check(code C.int32_t, s *step) {
	if code != C.FASTROOF_OK {
		panic(fmt.Sprintf("fastroof: %s: %d requests, new tokens %d, draft tokens %d; exported with "+
			"max_num_batched_tokens=%d, max_num_seqs=%d", C.GoString(C.fastroof_message(code)), s.count,
			s.newTokens[:s.count], m.DraftTokens, m.MaxTokens(), m.MaxSeqs()))
	}
}

func max64(a, b int64) int64 {
	if a > b {
		return a
	}
	return b
}

// QueueingTime returns a request's host time, us. Behind a real API server, requests that arrive together also wait for
// each other; BLIS has no such queue.
func (m *Model) QueueingTime(request *sim.Request) int64 {
	return int64(math.RoundToEven(m.admission(len(request.InputTokens))))
}

func (m *Model) admission(promptTokens int) float64 {
	return m.Request + m.PromptToken*float64(promptTokens)
}

// OutputTokenProcessingTime returns OutputToken.
func (m *Model) OutputTokenProcessingTime() int64 { return m.OutputToken }

// PostDecodeFixedOverhead returns PostDecode.
func (m *Model) PostDecodeFixedOverhead() int64 { return m.PostDecode }
