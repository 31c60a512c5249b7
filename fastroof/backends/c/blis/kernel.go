package fastroof

// #include "fastroof_step.h"
import "C"

import (
	"math"
	"strings"
	"time"

	latencykernel "github.com/inference-sim/blis-latency-kernel"
	"github.com/inference-sim/blis-schemas/kernel"
	"github.com/inference-sim/blis-schemas/spec/deployment"
	"github.com/inference-sim/blis-schemas/vocab"
)

// Kernel is a plan as a kernel.Kernel of blis-schemas, from which BLIS's main branch takes step times, memory, host
// times and transfers. Copy this file next to blis.go. In OpenPool (sim/kernelmodel/kernelmodel.go, as at
// a919bf9a8feb1c518df4c3445f27188008462fb2), in place of the call of latencykernel.New, and with an import of
// sim/fastroof:
//
//	k, err := fastroof.NewKernel("$STEP/llama-3.1-8b.plan", in)
//
// Pools that prefill and decode apart open a plan each: choose it by in.PoolIndex. What a plan does not hold comes from
// BLIS's own documents: the bandwidth between nodes, and of the devices for offloaded KV cache.
type Kernel struct {
	*Model
	in   latencykernel.Inputs
	pool deployment.Pool
}

var _ kernel.Kernel = (*Kernel)(nil)

// NewKernel maps a plan file for a pool of a deployment, and expands environment variables in its path. It returns an
// error if the plan is of another model, GPU, layout or format, or of smaller steps.
func NewKernel(path string, in latencykernel.Inputs) (*Kernel, error) {
	m, err := openPlan(path)
	if err != nil {
		return nil, err
	}
	k := &Kernel{m, in, in.Deployment.Pools[in.PoolIndex]}
	layout, engine := k.pool.Parallel, k.pool.Engine
	of := served{model: in.Scenario.Model, gpu: in.Chip.Name, layers: int64(in.Model.Stack.Layers()),
		tp: floor(layout.TP), pp: floor(layout.PP), dp: floor(layout.DP), ep: int64(layout.ExpertParallelWidth()),
		cp: floor(layout.PCP), weightBytes: in.Model.Global.WeightDType.Bytes(),
		tokens: int64(engine.MaxNumBatchedTokens), seqs: int64(engine.MaxNumSeqs), adapters: m.facts.Lora != ""}
	if engine.Quantization != "" { // unknown for awq, compressed-tensors
		of.weightBytes = weightBytes[strings.ToLower(engine.Quantization)]
	}
	if cache := strings.ToLower(engine.CacheDType); strings.HasPrefix(cache, "fp8") {
		of.kvDtype = "fp8"
	} else if cache != "" && cache != "auto" {
		of.kvDtype = strings.Replace(cache, "bfloat16", "bf16", 1)
	}
	if err := m.refuse(of); err != nil {
		return nil, err
	}
	if m.facts.Layout.PP > 1 || layout.DCP > 1 {
		return nil, m.closed("cannot time pipeline stages or dcp for BLIS: use pp 1 and dcp 1")
	}
	if engine.Speculative != nil {
		m.DraftTokens = int64(engine.Speculative.NumSpecTokens)
	}
	return k, nil
}

func floor(width int) int64 { return max64(1, int64(width)) }

// FixedBytes returns what a GPU holds besides KV cache. CommBuffers are the CUDA context and what libraries hold;
// there are no redundant experts.
func (k *Kernel) FixedBytes() kernel.MemoryBreakdown {
	memory := k.facts.Memory
	return kernel.MemoryBreakdown{
		Weights:        memory["weight_bytes"] + memory["adapter_bytes"],
		ActivationPeak: memory["activation_bytes"] + memory["workspace_bytes"],
		CUDAGraph:      memory["graphs_bytes"],
		CommBuffers:    memory["context_bytes"],
	}
}

// SequenceFixedBytes returns the size of a sequence's recurrent state on a GPU.
func (k *Kernel) SequenceFixedBytes() int64 { return k.facts.Memory["state_bytes_per_sequence"] }

// SequenceVariableBytes returns the size of a sequence's KV cache on a GPU, in whole blocks; layers with a window keep
// no more than that.
func (k *Kernel) SequenceVariableBytes(tokens int) int64 {
	if tokens <= 0 {
		return 0
	}
	block := int64(k.pool.Engine.BlockSize)
	if block <= 0 {
		block = max64(1, k.facts.Memory["block_tokens"])
	}
	blocks := (int64(tokens) + block - 1) / block
	bytes := new([2]C.int64_t)
	if code := C.fastroof_kv_bytes(k.plan, C.int64_t(blocks*block), &bytes[0], &bytes[1]); code != C.FASTROOF_OK {
		panic("fastroof: KV cache of a sequence: " + C.GoString(C.fastroof_message(code)))
	}
	return int64(bytes[0]) - k.SequenceFixedBytes()
}

// StepTime returns the plan's time of a step as both bounds of the estimate, without parts by resource. It ignores
// SMBudget and DecodeThreshold of the batch, and panics if the step is larger than the plan's.
func (k *Kernel) StepTime(batch kernel.Batch) kernel.StepEstimate {
	s := k.steps.Get().(*step)
	defer k.steps.Put(s)
	s.empty(len(batch.Reqs))
	for _, request := range batch.Reqs {
		s.add(int64(request.Scheduled), int64(request.Computed),
			k.DraftTokens > 0 && request.Computed >= request.PromptLen)
	}
	takes := micros(k.us(s))
	return kernel.StepEstimate{Overlap: takes, NoOverlap: takes}
}

// TierTime returns the time of a transfer to or from a device of the catalog, whose bandwidth queued transfers share.
// An unknown device takes forever, as with BLIS's own kernel.
func (k *Kernel) TierTime(tier string, dir kernel.Direction, bytes int64, queueDepth int) time.Duration {
	for _, device := range k.in.Devices {
		if device.Name != tier {
			continue
		}
		megabytes := device.ReadBandwidthMBs
		if dir == kernel.DirectionToTier {
			megabytes = device.WriteBandwidthMBs
		}
		us := float64(bytes) * float64(max64(1, int64(queueDepth))) / megabytes
		return micros(math.Max(us, device.BaseLatencyUs))
	}
	return math.MaxInt64
}

// PDTransferTime returns the time that a sequence's KV cache takes from GPUs of this layout to as many of the other
// pool: over NVLink within a node, else over the rack's or the cluster's network; forever if that has no bandwidth.
func (k *Kernel) PDTransferTime(tokens int, from, to kernel.Placement) time.Duration {
	perSecond := 0.0 // NVLink's
	if from.Node != to.Node {
		perSecond = k.in.Chip.IntraRackBwGBps * 1e9
		if from.Rack != to.Rack || perSecond == 0 {
			if k.in.Fabric == nil || k.in.Fabric.InterNodeBwGBps == 0 {
				return math.MaxInt64
			}
			perSecond = k.in.Fabric.InterNodeBwGBps * 1e9
		}
	}
	us := new(C.double)
	code := C.fastroof_kv_transfer_us(k.plan, k.plan, C.int64_t(tokens), C.double(perSecond), 0, us)
	if code != C.FASTROOF_OK {
		panic("fastroof: transfer of a KV cache: " + C.GoString(C.fastroof_message(code)))
	}
	return micros(float64(*us))
}

// AdmissionOverhead returns a request's host time, see Model.QueueingTime.
func (k *Kernel) AdmissionOverhead(promptTokens int) time.Duration {
	return micros(k.admission(promptTokens))
}

// OutputTokenOverhead returns OutputToken.
func (k *Kernel) OutputTokenOverhead() time.Duration {
	return time.Duration(k.OutputToken) * time.Microsecond
}

// CompletionOverhead returns PostDecode.
func (k *Kernel) CompletionOverhead() time.Duration {
	return time.Duration(k.PostDecode) * time.Microsecond
}

// Provenance names the plan and the source of its kernels' times. `fastroof step` prints the errors of steps.
func (k *Kernel) Provenance() []kernel.CoefficientOrigin {
	f := &k.facts
	of := func(name string, method vocab.Method, scope string) kernel.CoefficientOrigin {
		return kernel.CoefficientOrigin{Name: name, Set: "fastroof " + f.Version, Method: string(method),
			Scope: f.Model + " on " + f.GPU + ", " + f.Engine + scope}
	}
	steps, host := vocab.MethodMeasured, vocab.MethodMeasured
	if f.Method == "datasheet" {
		steps = vocab.MethodVendorSpec
	} else if strings.Contains(f.Kernels, "scaled") {
		steps = vocab.MethodCopied
	}
	if k.Request == 0 && k.PromptToken == 0 {
		host = vocab.MethodNotCharged
	}
	return []kernel.CoefficientOrigin{of("step_time", steps, ": "+f.Kernels+", tables "+f.Tables),
		of("memory", vocab.MethodAssumed, ""), of("host_admission", host, ""),
		of("host_output_token", vocab.MethodNotCharged, ""), of("host_completion", vocab.MethodNotCharged, "")}
}

// Resolved returns the plan's layout, and asynchronous scheduling as requested. It leaves the all-reduce backend empty.
func (k *Kernel) Resolved() kernel.Resolution {
	layout := k.facts.Layout
	async := k.pool.Engine.AsyncScheduling
	return kernel.Resolution{TensorParallelWidth: int(layout.TP), DataParallelWidth: int(layout.DP),
		ExpertParallelWidth: int(layout.EP), AsyncScheduling: async != nil && *async}
}

// Deployment returns the pool of the document.
func (k *Kernel) Deployment() deployment.Pool { return k.pool }

func micros(us float64) time.Duration {
	if us >= math.MaxInt64/1e3 {
		return math.MaxInt64
	}
	return time.Duration(math.RoundToEven(us * 1e3))
}
