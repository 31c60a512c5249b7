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
	model, err := Open("$FASTROOF_PLAN", sim.SimConfig{})
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
				if said, _ := recover().(string); !strings.Contains(said, "max_num_batched_tokens=8192, max_num_seqs=1024") {
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
	var asked sim.LatencyModel = model
	request := &sim.Request{InputTokens: make([]sim.TokenID, 10)}
	if asked.QueueingTime(request) != 0 { // of a plan without a front end
		t.Error("not what the plan has")
	}
	model.Request, model.PromptToken, model.OutputToken, model.PostDecode = 3, 0.5, 5, 7
	if asked.QueueingTime(request) != 8 || asked.OutputTokenProcessingTime() != 5 || asked.PostDecodeFixedOverhead() != 7 {
		t.Error("not what was set")
	}
}

func TestStepsAreWrittenWhereTheEnvironmentSays(t *testing.T) {
	path := t.TempDir() + "/steps"
	t.Setenv("FASTROOF_STEPS", path)
	model := opened(t)
	model.StepTime([]*sim.Request{{NumNewTokens: 512}, {ProgressIndex: 7}, {NumNewTokens: 1, ProgressIndex: 900}})
	model.StepTime(nil)
	text, err := os.ReadFile(path)
	if lines := strings.Split(string(text), "\n"); err != nil || !strings.HasSuffix(lines[0], " 512@0 1@900") || lines[1] != "0" {
		t.Errorf("%q, %v", text, err)
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
		if _, err := Open(path, sim.SimConfig{}); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestAPlanSaysWhatItIs(t *testing.T) {
	if said := opened(t).Describe(); !strings.Contains(said, `"gpu": "h100"`) {
		t.Error(said)
	}
}

// Logged for test_examples.py, which has the same steps from Python.
func TestDecodesThatVerifyDraftTokens(t *testing.T) {
	model := opened(t)
	prompt := make([]sim.TokenID, 500)
	decode := func(progress int64, accepted int) *sim.Request {
		return &sim.Request{InputTokens: prompt, ProgressIndex: progress, NumNewTokens: accepted}
	}
	chunk := &sim.Request{InputTokens: prompt, ProgressIndex: 100, NumNewTokens: 256}
	decodes := []*sim.Request{decode(500, 1), decode(900, 3), decode(1000, 4)}
	alone := model.StepTime([]*sim.Request{chunk})
	model.DraftTokens = 3
	for name, batch := range map[string][]*sim.Request{"one": decodes[:1], "three": decodes,
		"mixed": {chunk, decode(500, 2)}, "chunk": {chunk}} {
		t.Logf("verified %s %d", name, model.StepTime(batch))
	}
	if model.StepTime([]*sim.Request{decode(900, 1)}) != model.StepTime([]*sim.Request{decode(900, 4)}) {
		t.Error("what was accepted moves the price")
	}
	if us := model.StepTime([]*sim.Request{chunk}); us != alone {
		t.Errorf("a prompt takes %d us, %d us without draft tokens", us, alone)
	}
	defer func() {
		if said, _ := recover().(string); !strings.Contains(said, "draft tokens 9000") {
			t.Errorf("%q", said)
		}
	}()
	model.DraftTokens = 9000
	t.Errorf("%d us", model.StepTime(decodes))
}
