package spikesamplingprocessor

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// Of several different spans that share an id, each is known again.
func TestDuplicatesAreFoundAmongSpansThatShareAnID(t *testing.T) {
	for name, others := range map[string]uint64{"in a small trace": 0, "in a large one": 3 * manySpans} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, policies(keepAll))
			for i := range others {
				h.send(makeTraces(1, app("a", span{id: 100 + i, parent: 2, to: time.Millisecond})))
			}
			x := app("a", span{id: 2, kind: server, to: time.Second, name: "x"})
			y := app("a", span{id: 2, kind: server, to: time.Second, name: "y"})
			z := app("a", span{id: 2, kind: client, parent: 9, to: time.Second, name: "y"})
			foreign := app("b", span{id: 2, kind: server, to: time.Second, name: "y"})
			for _, s := range []service{x, y, z, foreign, x, y, y, z, foreign} {
				h.send(makeTraces(1, s))
			}
			h.pass(10 * time.Second)
			assert.Len(t, h.kept()[traceID(1)], 4+int(others))
			assert.Equal(t, map[string]int64{dropDuplicate: 5}, h.sum("spans_dropped", "reason"))
			assert.Zero(t, h.p.buffer.bytes, "what is charged is given back")
		})
	}
}

// Spans made to share an id do not slow the processor down with their number.
func TestManySpansWithOneIDAreTakenInReasonableTime(t *testing.T) {
	h := newHarness(t, policies(keepAll))
	const n = 50_000
	spans := make([]span, n)
	for i := range spans {
		spans[i] = span{id: 2, kind: client, to: time.Second + time.Duration(i)}
	}
	h.send(makeTraces(1, app("a", spans...)), makeTraces(1, app("a", spans...)))
	assert.Equal(t, n, h.p.buffer.spans)
	h.pass(time.Minute)
	assert.Equal(t, map[string]int64{dropDuplicate: n}, h.sum("spans_dropped", "reason"))
}
