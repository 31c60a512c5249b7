package fastroof

import (
	"os"
	"testing"

	"github.com/inference-sim/inference-sim/sim"
)

// batches are steps of 218 decodes, each request in a kilobyte of its own. One batch stays in the cache; of 400,
// some 100 MB, none does.
func batches(count int) [][]*sim.Request {
	made := make([][]*sim.Request, count)
	for i := range made {
		made[i] = make([]*sim.Request, 218)
		for j := range made[i] {
			place := new(struct {
				request sim.Request
				_       [1024]byte
			})
			place.request = sim.Request{NumNewTokens: 1, ProgressIndex: int64(500 + 7*i%1000 + 10*j)}
			made[i][j] = &place.request
		}
	}
	return made
}

var sum int64

func walk(batch []*sim.Request) {
	for _, request := range batch {
		sum += int64(request.NumNewTokens) + request.ProgressIndex
	}
}

func timed(b *testing.B, count int, price func([]*sim.Request)) {
	asked := batches(count)
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; i < b.N; i++ {
		price(asked[i%count])
	}
}

func BenchmarkStepOf218(b *testing.B) {
	path := os.Getenv("FASTROOF_PLAN")
	model, err := Open(path, sim.SimConfig{})
	if err != nil {
		b.Fatal(err)
	}
	defer model.Close()
	one := batches(1)[0]
	step := func(batch []*sim.Request) { sum += model.StepTime(batch) }
	b.Run("walk/hot", func(b *testing.B) { timed(b, 1, walk) })
	b.Run("walk/cold", func(b *testing.B) { timed(b, 400, walk) })
	b.Run("call", func(b *testing.B) { timed(b, 1, func([]*sim.Request) { sum += model.MaxTokens() }) })
	b.Run("one", func(b *testing.B) { timed(b, 1, func([]*sim.Request) { sum += model.StepTime(one[:1]) }) })
	b.Run("step/hot", func(b *testing.B) { timed(b, 1, step) })
	b.Run("step/cold", func(b *testing.B) { timed(b, 400, step) })
}
