package cluster

import (
	"testing"

	"github.com/inference-sim/inference-sim/sim"
)

func TestAnInstanceAsksThePlan(t *testing.T) {
	instance := NewInstanceSimulator("one", sim.SimConfig{})
	if us := instance.Step([]*sim.Request{{NumNewTokens: 1, ProgressIndex: 4095}}); us < 100 {
		t.Errorf("%d us", us)
	}
}
