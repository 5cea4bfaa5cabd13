//go:build cgo

package main

// __thread char odd[13] = {1};
// __thread long other __attribute__((aligned(64))) = 2;
// static long sum(void) { return odd[0] + other; }
import "C"

// touch uses thread-local variables beside g.
func touch() bool { return C.sum() == 3 }
