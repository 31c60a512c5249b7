// Time the steps of one plan:  go run . ../NAME.plan
package main

// #cgo CFLAGS: -I${SRCDIR}/..
// #cgo LDFLAGS: ${SRCDIR}/../fastroof_step.o
// #include <stdlib.h>
// #include "fastroof_step.h"
import "C"

import (
	"fmt"
	"math"
	"os"
	"time"
	"unsafe"
)

func check(code C.int32_t) {
	if code != C.FASTROOF_OK {
		fmt.Fprintln(os.Stderr, "example:", C.GoString(C.fastroof_message(code)))
		os.Exit(1)
	}
}

func show(what string, us float64) {
	fmt.Printf("%s: %.3f us, bits %016x\n", what, us, math.Float64bits(us))
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: example NAME.plan")
		os.Exit(2)
	}
	path := C.CString(os.Args[1])
	defer C.free(unsafe.Pointer(path))
	var plan *C.fastroof_plan
	check(C.fastroof_open(path, &plan))
	defer C.fastroof_close(plan)
	fmt.Println("plan:", C.GoString(C.fastroof_describe(plan)))

	// One place for every answer: what C gets the address of, Go allocates.
	us := new(C.double)
	memory := new(C.fastroof_memory_of)
	check(C.fastroof_memory(plan, memory))
	fmt.Println(memory.max_kv_tokens, "tokens of KV cache fit,", memory.kv_bytes_per_token, "bytes each")

	check(C.fastroof_decode_us(plan, 64, 4096, us))
	show("64 decodes at 4096 tokens", float64(*us))

	check(C.fastroof_verify_us(plan, 64, 4096, 4, us))
	show("the same, 4 tokens verified by each", float64(*us))

	newTokens, contextLen := [32]C.int64_t{2048}, [32]C.int64_t{}
	for i := 1; i < len(newTokens); i++ {
		newTokens[i], contextLen[i] = 1, C.int64_t(100*i)
	}
	check(C.fastroof_step_us(plan, &newTokens[0], &contextLen[0], C.int64_t(len(newTokens)), us))
	show("a prompt of 2048 tokens and 31 decodes", float64(*us))

	const calls = 1000000
	sumUs := 0.0
	start := time.Now()
	for i := 0; i < calls; i++ {
		check(C.fastroof_decode_us(plan, C.int64_t(1+i%256), C.int64_t(1+i%8191), us))
		sumUs += float64(*us)
	}
	ns := float64(time.Since(start).Nanoseconds()) / calls
	show("1000000 decode steps", sumUs)
	fmt.Printf("a call: %.1f ns\n", ns)
}
