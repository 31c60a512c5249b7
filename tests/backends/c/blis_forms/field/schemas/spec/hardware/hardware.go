// Package hardware stands in for that of blis-schemas.
package hardware

// Chip is a GPU.
type Chip struct {
	Name            string  `yaml:"-"`
	MemoryGiB       float64 `yaml:"MemoryGiB"`
	IntraRackBwGBps float64 `yaml:"IntraRackBwGBps,omitempty"`
}

// Fabric is a network between nodes.
type Fabric struct {
	InterNodeBwGBps float64 `yaml:"InterNodeBwGBps"`
}

// StorageDevice holds offloaded KV cache.
type StorageDevice struct {
	Name              string  `yaml:"name"`
	ReadBandwidthMBs  float64 `yaml:"read_bandwidth"`
	WriteBandwidthMBs float64 `yaml:"write_bandwidth"`
	BaseLatencyUs     float64 `yaml:"base_latency"`
}
