module github.com/inference-sim/blis-latency-kernel

go 1.19

require github.com/inference-sim/blis-schemas v0.2.0
