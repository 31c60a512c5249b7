package sim

// Run serves requests, sorted by arrival, on one instance: decodes first, then prefill in chunks, first come
// first served. It calls observe with every step's time and requests, before they make progress, and returns
// the number of steps.
func Run(config SimConfig, requests []*Request, observe func(us int64, batch []*Request)) int {
	model := config.LatencyModel
	var running []*Request
	clock, steps := int64(0), 0
	for len(requests) > 0 || len(running) > 0 {
		budget := formed(running, config.MaxNumBatchedTokens)
		for len(requests) > 0 && budget > 0 && int64(len(running)) < config.MaxNumSeqs {
			next := requests[0]
			queued := next.ArrivalTime + model.QueueingTime(next)
			if len(running) == 0 && clock < queued {
				clock = queued
			}
			if clock < queued {
				break
			}
			running, requests = append(running, next), requests[1:]
			budget -= granted(next, budget)
		}
		us := model.StepTime(running)
		observe(us, running)
		clock += us
		steps++
		running = progressed(running, model, clock, us)
	}
	return steps
}

// formed gives the running requests their tokens, and returns what is left of the budget.
func formed(running []*Request, budget int64) int64 {
	for _, request := range running {
		budget -= granted(request, budget)
	}
	return budget
}

func granted(request *Request, budget int64) int64 {
	tokens := request.InputLen() - request.ProgressIndex
	if tokens <= 0 {
		tokens = 1
	}
	if tokens > budget {
		tokens = budget
	}
	request.NumNewTokens = int(tokens)
	return tokens
}

// progressed counts the tokens of a step that ended at clock, and returns who goes on. The end of the prompt
// gives the first output token.
func progressed(running []*Request, model LatencyModel, clock, us int64) []*Request {
	left := running[:0]
	for _, request := range running {
		request.ProgressIndex += int64(request.NumNewTokens)
		outputs := request.ProgressIndex - request.InputLen() + 1
		if request.NumNewTokens > 0 && outputs > 0 {
			request.ITL = append(request.ITL, us+model.OutputTokenProcessingTime())
		}
		if outputs >= int64(len(request.OutputTokens)) {
			request.DepartureTime = clock + model.PostDecodeFixedOverhead()
		} else {
			left = append(left, request)
		}
	}
	return left
}
