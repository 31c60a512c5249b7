// Package deployment stands in for that of blis-schemas.
package deployment

// Deployment is how a model is laid out.
type Deployment struct {
	Kind  string `yaml:"kind"`
	Name  string `yaml:"name"`
	Pools []Pool `yaml:"pools"`
}

// Role is what a pool does of a request.
type Role string

// Pool is engines of one layout.
type Pool struct {
	Role     Role        `yaml:"role"`
	Nodes    int         `yaml:"nodes"`
	Parallel Parallelism `yaml:"parallel"`
	Engine   Engine      `yaml:"engine"`
}

// Parallelism is the layout of an engine.
type Parallelism struct {
	TP                   int  `yaml:"tp"`
	PP                   int  `yaml:"pp"`
	DP                   int  `yaml:"dp"`
	EnableExpertParallel bool `yaml:"enable_expert_parallel"`
	PCP                  int  `yaml:"pcp,omitempty"`
	DCP                  int  `yaml:"dcp,omitempty"`
}

// ExpertParallelWidth is 1, or all ranks of an engine.
func (p Parallelism) ExpertParallelWidth() int {
	width := 1
	for _, one := range []int{p.TP, p.PCP, p.DP} {
		if one > 1 && p.EnableExpertParallel {
			width *= one
		}
	}
	return width
}

// Engine is the settings of an engine.
type Engine struct {
	AsyncScheduling     *bool        `yaml:"async_scheduling,omitempty"`
	BlockSize           int          `yaml:"block_size,omitempty"`
	MaxNumBatchedTokens int          `yaml:"max_num_batched_tokens,omitempty"`
	MaxNumSeqs          int          `yaml:"max_num_seqs,omitempty"`
	Quantization        string       `yaml:"quantization,omitempty"`
	CacheDType          string       `yaml:"cache_dtype,omitempty"`
	Speculative         *Speculative `yaml:"speculative,omitempty"`
}

// Speculative is how an engine drafts.
type Speculative struct {
	Method        string `yaml:"method"`
	NumSpecTokens int    `yaml:"num_spec_tokens"`
}
