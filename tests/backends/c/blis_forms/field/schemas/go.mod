module github.com/inference-sim/blis-schemas

go 1.19
