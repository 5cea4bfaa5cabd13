package loadtest

import (
	"math/rand/v2"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// burst is the number of spikes of one kind that follow each other in a burst:
// one more than DBSCAN needs for a cluster.
const burst = 6

// step is one request of a plan. Fault is stage.Unknown for a normal one.
type step struct {
	request request
	fault   stage.Stage
	lone    bool // a spike by itself, not one of a burst
}

// plan mixes spikes into normal requests, the same ones for the same numbers:
// by turns a burst and a lone spike of each kind, with normal requests spread
// evenly between them. Every kind gets its share. Requests have about size words
// and tokens.
func plan(normal, spikes, size int, kinds []stage.Stage) []step {
	type group struct {
		fault stage.Stage
		size  int
	}
	var groups []group
	if len(kinds) > 0 {
		left := make([]int, len(kinds)) // spikes still to place, by kind
		for i := range spikes {
			left[i%len(kinds)]++
		}
		for turn := 0; spikes > 0; turn++ {
			i := turn % len(kinds)
			size := 1
			if turn/len(kinds)%2 == 0 {
				size = burst
			}
			if size = min(size, left[i]); size > 0 {
				groups = append(groups, group{kinds[i], size})
			}
			left[i] -= size
			spikes -= size
		}
	}

	random := rand.New(rand.NewPCG(1, 2))
	steps := make([]step, 0, normal)
	for i, g := range groups {
		for range normal*(i+1)/(len(groups)+1) - normal*i/(len(groups)+1) {
			steps = append(steps, step{request: normalRequest(random, size)})
		}
		for range g.size {
			steps = append(steps, step{request: faults[g.fault].request(size), fault: g.fault, lone: g.size == 1})
		}
	}
	for range normal - normal*len(groups)/(len(groups)+1) {
		steps = append(steps, step{request: normalRequest(random, size)})
	}
	return steps
}

// normalRequest varies what clients vary: length, within a factor of three,
// streaming and connection reuse.
func normalRequest(random *rand.Rand, size int) request {
	return request{
		words:    size/2 + random.IntN(size),
		tokens:   size/2 + random.IntN(size),
		stream:   random.IntN(4) > 0,
		logprobs: random.IntN(8) == 0,
		newConn:  random.IntN(8) == 0,
	}
}
