package spikesamplingprocessor

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// setWall sets the wall clock ahead of the time that passes.
func (h *harness) setWall(ahead time.Duration) {
	h.p.mu.Lock()
	defer h.p.mu.Unlock()
	h.p.now = func() time.Time { return h.clock.Add(ahead) }
	h.p.elapsed = func(time.Time) time.Duration { return h.clock.Sub(epoch) }
}

// A wall clock that is set, there and back, neither hurries decisions nor stops
// them, nor the steps of clusters and the baseline.
func TestAWallClockThatIsSetDoesNotMoveDecisions(t *testing.T) {
	for name, jump := range map[string]time.Duration{"forward": time.Hour, "backward": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, policies(keepAll))
			h.pass(time.Second)
			h.send(makeTraces(1, app("a", span{id: 2, kind: server, to: 1})))
			h.setWall(jump)
			h.pass(time.Second)
			assert.Empty(t, h.kept(), "its time has not come")
			h.setWall(0)
			h.send(makeTraces(2, app("a", span{id: 2, kind: server, to: 1})))
			h.pass(5 * time.Second)
			assert.Len(t, h.kept(), 1)
			h.pass(1500 * time.Millisecond)
			assert.Len(t, h.kept(), 2, "6 s after the root")
			assert.LessOrEqual(t, h.p.nextStep, h.p.lastTick+h.p.cfg.Clustering.Stride.Nanoseconds())
			assert.Empty(t, h.sum("traces_decided_early", "reason"))
		})
	}
}

// Only times with a reading of the monotonic clock are told apart by it.
func TestTheClockReadsTheMonotonicOne(t *testing.T) {
	p := newTestProcessor(t, defaultConfig(), nil)
	assert.Contains(t, p.now().String(), " m=")
	p.begin(t.Context())
	assert.InDelta(t, 0, p.elapsed(p.now()), float64(time.Minute))
}

// A clock that was wrong at the start and is then set right: spans, whose times
// are by it, are neighbours as before, and clusters say when they were by it.
func TestSpikesFindEachOtherAfterTheWallClockWasSet(t *testing.T) {
	h := newHarness(t, nil)
	h.warm(map[string]float64{"stage.lock": 0})
	for _, ahead := range []time.Duration{-time.Hour, time.Hour} {
		h.sink.Reset()
		h.setWall(ahead)
		const late = 3 * time.Second // they come so much later than they tell
		first := h.clock.Sub(epoch) + ahead - late
		for i := range uint64(10) {
			at := h.clock.Sub(epoch) + ahead - late
			h.send(makeTraces(uint64(ahead)+i, kernel("llm", request(2, 1, at-time.Second, at, map[string]float64{"stage.lock": 0.4}))))
			h.pass(tickInterval)
		}
		h.pass(10 * time.Second)
		kept := h.kept()
		require.Len(t, kept, 10)
		var last ptrace.Span
		for i := range uint64(10) {
			last = kept[traceID(uint64(ahead)+i)][0]
			require.NotEmpty(t, str(last, attrClusterID))
		}
		assert.Equal(t, timestamp(epoch.Add(first).UnixNano()), str(last, attrClusterStart))
	}
}
