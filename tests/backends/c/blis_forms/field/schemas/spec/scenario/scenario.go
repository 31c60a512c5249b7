// Package scenario stands in for that of blis-schemas.
package scenario

// Scenario is what is served.
type Scenario struct {
	Name  string `yaml:"name"`
	Model string `yaml:"model"`
}
