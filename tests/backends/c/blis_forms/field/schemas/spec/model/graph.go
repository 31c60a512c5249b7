// Package model stands in for that of blis-schemas.
package model

// Graph is a model.
type Graph struct {
	Name   string      `yaml:"name"`
	Global GlobalShape `yaml:"global"`
	Stack  Stack       `yaml:"stack"`
}

// GlobalShape is the shape of all its layers.
type GlobalShape struct {
	WeightDType DType `yaml:"weight_dtype"`
}

// DType is a number format.
type DType string

// Bytes of a number.
func (d DType) Bytes() float64 { return map[DType]float64{"bf16": 2, "fp8": 1, "nvfp4": 0.5}[d] }

// Stack is layers.
type Stack struct {
	Pattern []string `yaml:"pattern,omitempty"`
	Repeat  int      `yaml:"repeat,omitempty"`
}

// Layers is how many.
func (s Stack) Layers() int { return len(s.Pattern) * s.Repeat }
