package cluster

import (
	"os"
	"testing"

	"github.com/inference-sim/inference-sim/sim"
	"github.com/inference-sim/inference-sim/sim/fastroof"
)

func opened(t *testing.T, name string) *fastroof.Model {
	t.Helper()
	model, err := fastroof.Open(os.Getenv(name), sim.SimConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(model.Close)
	return model
}

func TestEachPoolAsksItsOwnPlan(t *testing.T) {
	model, decode := opened(t, "FASTROOF_PLAN"), opened(t, "FASTROOF_OTHER_PLAN")
	config, deployment := sim.SimConfig{}, DeploymentConfig{}
	config.LatencyModel = model
	deployment.PrefillOverrides.LatencyModel = model
	deployment.DecodeOverrides.LatencyModel = decode
	batch := []*sim.Request{{NumNewTokens: 1, ProgressIndex: 4095}}
	for name, pair := range map[string][2]int64{
		"all":     {NewInstanceSimulator(config).Step(batch), model.StepTime(batch)},
		"prefill": {NewInstanceSimulator(ResolvePoolConfig(config, deployment.PrefillOverrides)).Step(batch), model.StepTime(batch)},
		"decode":  {NewInstanceSimulator(ResolvePoolConfig(config, deployment.DecodeOverrides)).Step(batch), decode.StepTime(batch)},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: %d us, the plan's are %d", name, pair[0], pair[1])
		}
	}
	if model.StepTime(batch) == decode.StepTime(batch) {
		t.Error("both plans say the same")
	}
}

func TestDraftTokensAreBlissOwn(t *testing.T) {
	drafts := sim.SimConfig{SpeculativeConfig: sim.SpeculativeConfig{K: 3}}
	model, err := fastroof.Open(os.Getenv("FASTROOF_PLAN"), drafts)
	if err != nil || model.DraftTokens != 3 {
		t.Fatal(model, err)
	}
	model.Close()
}
