package fastroof

import (
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/inference-sim/inference-sim/sim"
)

func opened(t *testing.T) *Model {
	t.Helper()
	model, err := Open(os.Getenv("FASTROOF_PLAN"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(model.Close)
	return model
}

func TestAStepOfNothingTakesOneTick(t *testing.T) {
	model := opened(t)
	for _, batch := range [][]*sim.Request{nil, {}, {{ProgressIndex: 7}}} {
		if us := model.StepTime(batch); us != 1 {
			t.Errorf("%d requests: %d us", len(batch), us)
		}
	}
}

func TestARequestWithoutNewTokensTakesNoPart(t *testing.T) {
	model := opened(t)
	decode := &sim.Request{NumNewTokens: 1, ProgressIndex: 4095}
	alone := model.StepTime([]*sim.Request{decode})
	if us := model.StepTime([]*sim.Request{{ProgressIndex: 9}, decode, {}}); us != alone || us <= 1 {
		t.Errorf("%d us, alone %d", us, alone)
	}
}

func TestAStepBeyondThePlanPanics(t *testing.T) {
	model := opened(t)
	batches := map[string][]*sim.Request{
		"tokens":   {{NumNewTokens: int(model.MaxTokens()) + 1}},
		"requests": make([]*sim.Request, model.MaxSeqs()+1),
		"negative": {{NumNewTokens: -1, ProgressIndex: 5}},
	}
	for i := range batches["requests"] {
		batches["requests"][i] = &sim.Request{NumNewTokens: 1, ProgressIndex: 5}
	}
	for name, batch := range batches {
		func() {
			defer func() {
				if said, _ := recover().(string); !strings.Contains(said, "max_tokens=8192, max_seqs=1024") {
					t.Errorf("%s: %q", name, said)
				}
			}()
			t.Errorf("%s: %d us", name, model.StepTime(batch))
		}()
	}
	if us := model.StepTime([]*sim.Request{{NumNewTokens: int(model.MaxTokens())}}); us <= 1 {
		t.Errorf("the largest step takes %d us", us)
	}
}

func TestWorkOfTheHostIsTheCallersToSet(t *testing.T) {
	model := opened(t)
	model.Queueing, model.OutputToken, model.PostDecode = 3, 5, 7
	var asked sim.LatencyModel = model
	if asked.QueueingTime(&sim.Request{}) != 3 || asked.OutputTokenProcessingTime() != 5 ||
		asked.PostDecodeFixedOverhead() != 7 {
		t.Error("not what was set")
	}
}

func TestGoroutinesShareAModel(t *testing.T) {
	model := opened(t)
	batch := []*sim.Request{{NumNewTokens: 512}, {NumNewTokens: 1, ProgressIndex: 900}}
	short := batch[:1]
	want, wantShort := model.StepTime(batch), model.StepTime(short)
	var group sync.WaitGroup
	for i := 0; i < 8; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for call := 0; call < 2000; call++ {
				if model.StepTime(batch) != want || model.StepTime(short) != wantShort {
					t.Error("another answer than alone")
					return
				}
			}
		}()
	}
	group.Wait()
}

func TestWhatIsNoPlanIsAnError(t *testing.T) {
	for path, says := range map[string]string{
		"nowhere.plan": "cannot be opened",
		"blis_test.go": "not a plan file",
	} {
		if _, err := Open(path); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestAPlanSaysWhatItIs(t *testing.T) {
	if said := opened(t).Describe(); !strings.Contains(said, `"gpu": "h100"`) {
		t.Error(said)
	}
}
