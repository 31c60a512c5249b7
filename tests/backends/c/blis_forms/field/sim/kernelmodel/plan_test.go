package kernelmodel

import (
	"math"
	"os"
	"strings"
	"testing"
	"time"

	latencykernel "github.com/inference-sim/blis-latency-kernel"
	"github.com/inference-sim/blis-schemas/kernel"
	"github.com/inference-sim/blis-schemas/spec/deployment"
	"github.com/inference-sim/blis-schemas/spec/hardware"
	"github.com/inference-sim/blis-schemas/spec/model"
	"github.com/inference-sim/blis-schemas/spec/scenario"
	"github.com/inference-sim/inference-sim/sim/fastroof"
)

// documents of the deployment that FASTROOF_OTHER_PLAN is a plan of
func documents() latencykernel.Inputs {
	pool := deployment.Pool{Role: "prefill", Nodes: 1, Parallel: deployment.Parallelism{TP: 4},
		Engine: deployment.Engine{BlockSize: 16, MaxNumBatchedTokens: 2048, MaxNumSeqs: 256, Quantization: "fp8",
			CacheDType: "fp8_e4m3", Speculative: &deployment.Speculative{Method: "mtp", NumSpecTokens: 3}}}
	return latencykernel.Inputs{
		Scenario:   &scenario.Scenario{Model: "llama-3.1-70b-instruct"},
		Deployment: &deployment.Deployment{Pools: []deployment.Pool{{}, pool}},
		PoolIndex:  1,
		Model: &model.Graph{Global: model.GlobalShape{WeightDType: "bf16"},
			Stack: model.Stack{Pattern: []string{"dense"}, Repeat: 80}},
		Chip:    &hardware.Chip{Name: "h100", MemoryGiB: 80},
		Fabric:  &hardware.Fabric{InterNodeBwGBps: 50},
		Devices: []*hardware.StorageDevice{{Name: "nvme_gen4", ReadBandwidthMBs: 7000, WriteBandwidthMBs: 3500, BaseLatencyUs: 80}},
	}
}

func opened(t *testing.T) kernel.Kernel {
	t.Helper()
	made, err := OpenPool(documents())
	if err != nil {
		t.Fatal(err)
	}
	return made.k
}

// Logged for test_examples.py, which has the same numbers from Python.
func TestAKernelHasThePlansNumbers(t *testing.T) {
	k := opened(t)
	memory := k.FixedBytes()
	step := k.StepTime(kernel.Batch{Reqs: []kernel.ReqShape{{Scheduled: 256, Computed: 100, PromptLen: 400}, {},
		{Scheduled: 1, Computed: 500, PromptLen: 600}}})
	verified := k.StepTime(kernel.Batch{Reqs: []kernel.ReqShape{{Scheduled: 4, Computed: 500, PromptLen: 500},
		{Scheduled: 4, Computed: 900, PromptLen: 500}}})
	here, there := kernel.Placement{Pool: "prefill"}, kernel.Placement{Node: 1, Pool: "decode"}
	t.Logf("memory %d %d %d %d %d", memory.Weights, memory.ActivationPeak, memory.CUDAGraph, memory.CommBuffers, memory.Total())
	t.Logf("sequence %d %d %d", k.SequenceFixedBytes(), k.SequenceVariableBytes(1000), k.SequenceVariableBytes(0))
	t.Logf("step %d %d %d", step.Overlap, step.NoOverlap, verified.NoOverlap)
	t.Logf("transfer %d %d", k.PDTransferTime(1000, here, here), k.PDTransferTime(1000, here, there))
	t.Logf("host %d %d %d", k.AdmissionOverhead(1000), k.OutputTokenOverhead(), k.CompletionOverhead())
	if width := k.Resolved(); width.TensorParallelWidth != 4 || width.DataParallelWidth != 1 || width.ExpertParallelWidth != 1 {
		t.Errorf("%+v", width)
	}
	if pool := k.Deployment(); pool.Engine.BlockSize != 16 || pool.Role != "prefill" {
		t.Errorf("%+v", pool)
	}
	if from := k.Provenance(); from[0].Method != "measured" || !strings.HasPrefix(from[0].Scope, "llama-3.1-70b on h100, vllm: ") {
		t.Errorf("%+v", from)
	}
}

func TestDevicesAndNetworksAreOfBlissDocuments(t *testing.T) {
	k := opened(t)
	const bytes = 70_000_000
	for name, pair := range map[string][2]time.Duration{
		"read":    {k.TierTime("nvme_gen4", kernel.DirectionFromTier, bytes, 1), 10 * time.Millisecond},
		"write":   {k.TierTime("nvme_gen4", kernel.DirectionToTier, bytes, 1), 20 * time.Millisecond},
		"queued":  {k.TierTime("nvme_gen4", kernel.DirectionFromTier, bytes, 3), 30 * time.Millisecond},
		"small":   {k.TierTime("nvme_gen4", kernel.DirectionFromTier, 7, 1), 80 * time.Microsecond},
		"unknown": {k.TierTime("tape", kernel.DirectionFromTier, bytes, 1), math.MaxInt64},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: %v, not %v", name, pair[0], pair[1])
		}
	}
	in := documents()
	in.Fabric = nil
	made, err := OpenPool(in)
	if err != nil {
		t.Fatal(err)
	}
	if takes := made.k.PDTransferTime(1, kernel.Placement{}, kernel.Placement{Node: 1}); takes != math.MaxInt64 {
		t.Errorf("%v without a network", takes)
	}
	in.Chip.IntraRackBwGBps = 900
	if takes := made.k.PDTransferTime(1, kernel.Placement{}, kernel.Placement{Node: 1}); takes > time.Millisecond {
		t.Errorf("%v within a rack", takes)
	}
}

func TestAnotherDeploymentIsRefused(t *testing.T) {
	name := os.Getenv("FASTROOF_OTHER_PLAN")
	for differs, change := range map[string]func(*latencykernel.Inputs, *deployment.Pool){
		"model llama-3.1-70b (BLIS: mixtral-8x7b-v0.1)": func(in *latencykernel.Inputs, _ *deployment.Pool) { in.Scenario.Model = "mixtral-8x7b-v0.1" },
		"GPU h100 (BLIS: a100-80)":                      func(in *latencykernel.Inputs, _ *deployment.Pool) { in.Chip.Name = "a100-80" },
		"layers 80 (BLIS: 32)":                          func(in *latencykernel.Inputs, _ *deployment.Pool) { in.Model.Stack.Repeat = 32 },
		"tp 4 (BLIS: 8), pp 1 (BLIS: 2)":                func(_ *latencykernel.Inputs, pool *deployment.Pool) { pool.Parallel.TP, pool.Parallel.PP = 8, 2 },
		"dtype fp8 (BLIS: 2 bytes a weight)":            func(_ *latencykernel.Inputs, pool *deployment.Pool) { pool.Engine.Quantization = "" },
		"KV cache fp8 (BLIS: bf16)":                     func(_ *latencykernel.Inputs, pool *deployment.Pool) { pool.Engine.CacheDType = "bfloat16" },
		"max_num_seqs 1024 (BLIS: 2000)":                func(_ *latencykernel.Inputs, pool *deployment.Pool) { pool.Engine.MaxNumSeqs = 2000 },
	} {
		in := documents()
		change(&in, &in.Deployment.Pools[1])
		if _, err := OpenPool(in); err == nil || !strings.Contains(err.Error(), "is of another deployment: "+differs+"; `fastroof") {
			t.Errorf("%s of %s: %v", differs, name, err)
		}
	}
}

func TestEachRankOfAPoolHasThePlan(t *testing.T) {
	in := documents()
	in.Scenario.Model, in.Model.Stack.Repeat = "qwen3-30b-a3b", 48
	in.Deployment.Pools[1] = deployment.Pool{Parallel: deployment.Parallelism{DP: 2, EnableExpertParallel: true}}
	k, err := fastroof.NewKernel("$FASTROOF_RANKS", in)
	if err != nil {
		t.Fatal(err)
	}
	if width := k.Resolved(); width.DataParallelWidth != 2 || width.ExpertParallelWidth != 2 {
		t.Errorf("%+v", width)
	}
}
