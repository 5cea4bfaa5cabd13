package spikesamplingprocessor

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/pcommon"
)

// Whichever of a trace's spans comes first, children before parents and the kernel's
// before the application's, it is kept whole, with the same tree and the same reason.
func TestTheOrderInWhichSpansComeDoesNotMatter(t *testing.T) {
	ms := time.Millisecond
	run := func(seed uint64) []string {
		h := newHarness(t, nil)
		h.warm(map[string]float64{"stage.lock": 0.001})
		from := h.clock.Sub(epoch)
		at := func(d time.Duration) time.Duration { return from + d }
		parts := []service{
			app("web", span{id: 1, name: "GET", kind: client, from: at(0), to: at(500 * ms)}),
			app("llm", span{id: 10, parent: 1, name: "POST", kind: server, from: at(ms), to: at(499 * ms), remote: true}),
			app("llm", span{id: 11, parent: 10, name: "decode", kind: internal, from: at(2 * ms), to: at(490 * ms)}),
			app("llm", span{id: 12, parent: 11, name: "step", kind: internal, from: at(100 * ms), to: at(400 * ms)}),
			kernel("llm", request(20, 1, at(0), at(500*ms), map[string]float64{"stage.lock": 0.3})),
			kernel("llm", occurrence(21, 20, "lock", at(120*ms), at(320*ms))),
			kernel("llm", occurrence(22, 20, "lock", at(330*ms), at(430*ms))),
		}
		if seed > 0 {
			rng := rand.New(rand.NewPCG(seed, 1))
			rng.Shuffle(len(parts), func(i, k int) { parts[i], parts[k] = parts[k], parts[i] })
		}
		h.pass(500 * ms)
		for _, part := range parts {
			h.send(makeTraces(1, part))
			h.pass(200 * ms)
		}
		h.pass(20 * time.Second)
		var lines []string
		for _, s := range h.kept()[traceID(1)] {
			attrs := s.Attributes().AsRaw()
			lines = append(lines, fmt.Sprint(s.SpanID(), s.ParentSpanID(), s.Name(), s.TraceState().AsRaw(), attrs))
		}
		slices.SortFunc(lines, cmp.Compare[string])
		assert.Equal(t, map[string]int64{"spikes": 1, noPolicy: 200}, h.sum("traces_decided", "policy"))
		return lines
	}
	want := run(0)
	require.Len(t, want, 7)
	require.Contains(t, fmt.Sprint(want), "lock took 300ms")
	for seed := range uint64(30) {
		require.Equal(t, want, run(seed+1), "seed %d", seed+1)
	}
}

// A record holds no ids of its span twice: they come back with it, those of late spans too.
func TestIDsComeBackWithTheSpans(t *testing.T) {
	h := newHarness(t, nil)
	for i, s := range []span{{id: 2, kind: server, to: 2 * time.Second}, {id: 3, parent: 2, to: time.Second}, {id: 4, parent: 99, to: time.Second}} {
		h.send(makeTraces(7, app("a", s)))
		if i == 1 {
			h.pass(20 * time.Second) // the third is late
		}
	}
	h.pass(time.Second)
	got := map[pcommon.SpanID]pcommon.SpanID{}
	for _, s := range h.kept()[traceID(7)] {
		got[s.SpanID()] = s.ParentSpanID()
	}
	assert.Equal(t, map[pcommon.SpanID]pcommon.SpanID{spanID(2): {}, spanID(3): spanID(2), spanID(4): spanID(99)}, got)
}
