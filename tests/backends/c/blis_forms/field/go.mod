module github.com/inference-sim/inference-sim

go 1.19

require (
	github.com/inference-sim/blis-latency-kernel v0.1.0
	github.com/inference-sim/blis-schemas v0.2.0
)

replace (
	github.com/inference-sim/blis-latency-kernel => ./latency_kernel
	github.com/inference-sim/blis-schemas => ./schemas
)
