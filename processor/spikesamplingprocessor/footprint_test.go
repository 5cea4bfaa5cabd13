package spikesamplingprocessor

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/consumer/consumertest"
)

func heapInUse() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Traffic of every kind, several times what fits: the heap never holds more than
// a tenth above the bound.
func TestTheHeapStaysWithinTheBound(t *testing.T) {
	const mib = 32
	h := newHarnessTo(t, func(c *Config) {
		c.MaxBufferMiB = mib
		c.DecisionCache = DecisionCacheConfig{SampledCacheSize: 100, NonSampledCacheSize: 100}
	}, consumertest.NewNop())
	before := heapInUse()
	rng := rand.New(rand.NewPCG(1, 1))
	const traces, perTrace = 12_000, 10 // in flight at the same time, so that their spans are scattered
	most := int64(0)
	for round := range perTrace {
		for i := range uint64(traces) {
			now := h.clock.Sub(epoch)
			s := span{id: uint64(round) + 2, parent: 1, kind: client, from: now, to: now + time.Millisecond, name: "call", attrs: map[string]any{
				"http.request.method": "POST", "url.path": "/v1/chat/completions", "x": strings.Repeat("x", rng.IntN(300)),
			}}
			switch {
			case i%1000 == 7:
				s.attrs["prompt"] = strings.Repeat("p", 50_000)
			case i%500 == 3:
				s.to = now + 2*time.Second // a spike
			}
			h.send(makeTraces(i, app(fmt.Sprint("svc", i%8), s)))
			if i%3000 == 0 {
				h.pass(tickInterval)
				most = max(most, heapInUse()-before)
			}
		}
	}
	early := h.sum("traces_decided_early", "reason")
	require.Greater(t, early[earlyBufferFull], int64(1000), "more came than fits")
	t.Logf("bound %d, heap at most %d", mib<<20, most)
	assert.Less(t, most, int64(mib<<20)*11/10)
	assert.Greater(t, most, int64(mib<<20)*9/10, "and it is used")
	runtime.KeepAlive(h)
	require.NoError(t, h.p.Shutdown(context.Background()))
}

// A stream of ten minutes costs its spans, not its time: it holds no more of the
// buffer in the tenth minute than in the first, but for the spans that came.
func TestAStreamOfTenMinutesCostsOnlyItsSpans(t *testing.T) {
	h := newHarness(t, nil)
	h.warm(map[string]float64{"stage.lock": 0.001})
	from := h.clock.Sub(epoch)
	stall := func(n uint64) {
		at := h.clock.Sub(epoch)
		h.send(makeTraces(1, kernel("llm", occurrence(100+n, 2, "send_buffer", at-10*time.Millisecond, at))))
	}
	stall(0)
	first := h.p.buffer.bytes
	h.pass(9 * time.Minute)
	assert.Equal(t, first, h.p.buffer.bytes, "it waits for the request that still runs")
	for n := range uint64(9) {
		stall(n + 1)
	}
	assert.Less(t, h.p.buffer.bytes, 10*first)
	h.pass(time.Minute)
	at := h.clock.Sub(epoch)
	h.send(makeTraces(1, kernel("llm", request(2, 0, from, at, map[string]float64{"stage.lock": 0.001}))))
	h.pass(time.Second)
	assert.Empty(t, h.p.buffer.traces, "out within a second of its end")
	assert.Zero(t, h.p.buffer.bytes)
	assert.Empty(t, h.sum("traces_decided_early", "reason"))
}
