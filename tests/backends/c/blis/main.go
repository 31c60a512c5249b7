// Steps of an event loop that prices them by a plan, one a line: its us, then NEW@CONTEXT of each request.
// With -time, what a call and a step of the loop cost instead, against a model that always says the same.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/inference-sim/inference-sim/sim"
	"github.com/inference-sim/inference-sim/sim/fastroof"
)

type constant int64

func (c constant) StepTime([]*sim.Request) int64    { return int64(c) }
func (c constant) QueueingTime(*sim.Request) int64  { return 0 }
func (c constant) OutputTokenProcessingTime() int64 { return 0 }
func (c constant) PostDecodeFixedOverhead() int64   { return 0 }

func main() {
	timed := flag.Bool("time", false, "time the calls")
	flag.Parse()
	model, err := fastroof.Open(flag.Arg(0), config(nil))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	defer model.Close()
	if *timed {
		costs(model)
		return
	}
	sim.Run(config(model), workload(300), func(us int64, batch []*sim.Request) {
		var line strings.Builder
		for _, request := range batch {
			fmt.Fprintf(&line, " %d@%d", request.NumNewTokens, request.ProgressIndex)
		}
		fmt.Printf("%d%s\n", us, line.String())
	})
}

func config(model sim.LatencyModel) sim.SimConfig {
	return sim.SimConfig{MaxNumSeqs: 64, MaxNumBatchedTokens: 2048, LatencyModel: model}
}

// workload is the same at every run: prompts up to 4000 tokens, answers up to 200, 12 requests a second.
func workload(count int) []*sim.Request {
	state := uint64(1)
	below := func(limit uint64) int {
		state = state*6364136223846793005 + 1442695040888963407
		return int(state >> 33 % limit)
	}
	requests := make([]*sim.Request, count)
	arrival := int64(0)
	for i := range requests {
		arrival += int64(below(160000))
		requests[i] = &sim.Request{ID: fmt.Sprint("request_", i), ArrivalTime: arrival,
			InputTokens: make([]sim.TokenID, 1+below(4000)), OutputTokens: make([]sim.TokenID, 1+below(200))}
	}
	return requests
}

func costs(model *fastroof.Model) {
	steps, sumUs := 0, int64(0)
	sim.Run(config(model), workload(300), func(us int64, _ []*sim.Request) { steps, sumUs = steps+1, sumUs+us })
	models := []sim.LatencyModel{constant(sumUs / int64(steps)), model}
	names := []string{"constant", "fastroof"}
	for _, size := range []int{1, 8, 32, 256} {
		batch := make([]*sim.Request, size)
		for i := range batch {
			batch[i] = &sim.Request{NumNewTokens: 1, ProgressIndex: int64(1000 + 10*i)}
		}
		for i, m := range models {
			ns := least(func() (int, time.Duration) {
				const calls = 100000
				start := time.Now()
				for call := 0; call < calls; call++ {
					m.StepTime(batch)
				}
				return calls, time.Since(start)
			})
			fmt.Printf("%s, %d requests: %.1f ns a call\n", names[i], size, ns)
		}
	}
	for i, m := range models {
		done := 0
		ns := least(func() (int, time.Duration) {
			requests := workload(300)
			start := time.Now()
			done = sim.Run(config(m), requests, func(int64, []*sim.Request) {})
			return done, time.Since(start)
		})
		fmt.Printf("%s, event loop: %.1f ns a step of %d\n", names[i], ns, done)
	}
}

// least is the least of nine times of a piece of work, in ns for each of what it says it did.
func least(work func() (int, time.Duration)) float64 {
	best := 0.0
	for i := 0; i < 9; i++ {
		done, took := work()
		if ns := float64(took.Nanoseconds()) / float64(done); i == 0 || ns < best {
			best = ns
		}
	}
	return best
}
