// Package vocab stands in for that of blis-schemas: where a number comes from.
package vocab

// Method is one way to get a number.
type Method string

const (
	MethodMeasured   Method = "measured"
	MethodVendorSpec Method = "vendor_spec"
	MethodCopied     Method = "copied"
	MethodAssumed    Method = "assumed"
	MethodNotCharged Method = "not_charged"
)
