package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

func TestASoakFailsOnWhatIsNotAsItHasToBe(t *testing.T) {
	good := func() *report {
		return &report{
			Length: 2 * burstEvery, Rate: baseRate, Burst: burst * baseRate, Traces: 1000, Decided: 1000, Sampled: 20, Arrived: 20,
			Wanted: 20, Limit: bufferMiB, Buffer: 1.05 * bufferMiB, Resident: 2 * bufferMiB,
		}
	}
	require.NoError(t, good().check())
	for _, c := range []struct {
		want   string
		change func(*report)
	}{
		{"too slow", func(r *report) { r.Rate /= 2 }},
		{"in bursts", func(r *report) { r.Burst /= 2 }},
		{"buffer held", func(r *report) { r.Buffer = 1.2 * r.Limit }},
		{"never told", func(r *report) { r.Buffer = 0 }},
		{"collector took", func(r *report) { r.Resident = 5 * r.Limit }},
		{"999 decided", func(r *report) { r.Decided-- }},
		{"1001 decided", func(r *report) { r.Decided++ }},
		{"19 arrived", func(r *report) { r.Arrived-- }},
		{"1 of 20", func(r *report) { r.Missing++ }},
		{"lost: spans", func(r *report) { r.Losses = []string{"spans"} }},
	} {
		r := good()
		c.change(r)
		assert.ErrorContains(t, r.check(), c.want)
	}
	early := good()
	early.Missing, early.DecidedEarly = 3, 5
	assert.NoError(t, early.check(), "those are counted")
}

// The traces that have to be kept are those that are failed or slow in what is sent.
func TestWhatIsWantedIsWhatIsSent(t *testing.T) {
	for _, group := range []int{0, 7} {
		stands := map[pcommon.TraceID]bool{}
		spans := map[pcommon.TraceID]int{}
		for service := range services {
			for _, s := range batch(group, service).ResourceSpans().At(0).ScopeSpans().At(0).Spans().All() {
				spans[s.TraceID()]++
				took := s.EndTimestamp().AsTime().Sub(s.StartTimestamp().AsTime())
				stands[s.TraceID()] = stands[s.TraceID()] || took > time.Second || s.Status().Code() == ptrace.StatusCodeError
			}
		}
		assert.Len(t, spans, traces)
		for trace := range traces {
			id := traceID(group, trace)
			assert.Equal(t, services, spans[id])
			assert.Equal(t, wanted(group, trace), stands[id], "group %d, trace %d", group, trace)
		}
	}
}

func TestBurstsAreAtTheEndOfEachMinute(t *testing.T) {
	for at, want := range map[time.Duration]bool{0: false, 49 * time.Second: false, 51 * time.Second: true, 61 * time.Second: false, 115 * time.Second: true} {
		assert.Equal(t, want, bursting(at), at)
	}
}
