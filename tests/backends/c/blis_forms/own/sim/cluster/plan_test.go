package cluster

import (
	"fmt"
	"testing"

	"github.com/inference-sim/inference-sim/sim"
	"github.com/inference-sim/inference-sim/sim/fastroof"
)

// as BLIS makes one of the plan's deployment
func config() sim.SimConfig {
	hardware := sim.ModelHardwareConfig{Model: "meta-llama/llama-3.1-8b-instruct", GPU: "H100", TP: 1, DP: 1,
		ModelConfig: sim.ModelConfig{NumLayers: 32, BytesPerParam: 2}}
	return sim.SimConfig{ModelHardwareConfig: hardware,
		BatchConfig: sim.BatchConfig{MaxNumSeqs: 256, MaxNumBatchedTokens: 2048}}
}

func TestAnInstanceAsksThePlan(t *testing.T) {
	for _, cfg := range []sim.SimConfig{config(), {}} {
		instance := NewInstanceSimulator("one", cfg)
		if us := instance.Step([]*sim.Request{{NumNewTokens: 1, ProgressIndex: 4095}}); us < 100 {
			t.Errorf("%d us", us)
		}
	}
}

// Every field that BLIS states is compared, and the error is one line.
func TestAnotherDeploymentIsRefused(t *testing.T) {
	const head, tail = "one: llama-3.1-8b.plan ", "; `fastroof export c` writes a plan of BLIS's"
	for differs, change := range map[string]func(*sim.SimConfig){
		"model llama-3.1-8b (BLIS: meta-llama/llama-3.1-70b-instruct), layers 32 (BLIS: 80), tp 1 (BLIS: 4)": func(c *sim.SimConfig) {
			c.Model, c.TP, c.ModelConfig.NumLayers = "meta-llama/llama-3.1-70b-instruct", 4, 80
		},
		"GPU h100 (BLIS: A100-SXM)":                func(c *sim.SimConfig) { c.GPU = "A100-SXM" },
		"GPU h100 (BLIS: H20)":                     func(c *sim.SimConfig) { c.GPU = "H20" },
		"dp 1 (BLIS: 4), ep 1 (BLIS: 4)":           func(c *sim.SimConfig) { c.DP, c.ModelConfig.NumLocalExperts, c.EnableExpertParallel = 4, 8, true },
		"dtype bf16 (BLIS: 1 bytes a weight)":      func(c *sim.SimConfig) { c.ModelConfig.WeightBytesPerParam = 1 },
		"max_num_batched_tokens 8192 (BLIS: 8193)": func(c *sim.SimConfig) { c.MaxNumBatchedTokens = 8193 },
		"max_num_seqs 1024 (BLIS: 1025)":           func(c *sim.SimConfig) { c.MaxNumSeqs = 1025 },
		"LoRA adapters false (BLIS: true)":         func(c *sim.SimConfig) { c.Adapters = []string{"one"} },
	} {
		func() {
			cfg := config()
			change(&cfg)
			defer func() {
				want := head + "is of another deployment: " + differs + tail
				if said := fmt.Sprint(recover()); said != want {
					t.Errorf("%s\nnot %s", said, want)
				}
			}()
			NewInstanceSimulator("one", cfg)
		}()
	}
}

func TestAPlanOfSeveralRanksIsRefused(t *testing.T) {
	cfg := sim.SimConfig{}
	cfg.Model, cfg.TP, cfg.DP, cfg.EnableExpertParallel = "qwen/qwen3-30b-a3b", 1, 2, true
	cfg.ModelConfig = sim.ModelConfig{NumLayers: 48, NumLocalExperts: 128}
	const want = "ranks.plan times the steps of one rank, but BLIS's batches hold the requests of all 2: use dp 1"
	if _, err := fastroof.Open("$FASTROOF_RANKS", cfg); err == nil || err.Error() != want {
		t.Error(err)
	}
}
