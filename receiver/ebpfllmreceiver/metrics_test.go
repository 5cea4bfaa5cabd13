//go:build linux && amd64

package ebpfllmreceiver

import (
	"path/filepath"
	"testing"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/golden"
	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/pdatatest/pmetrictest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/pmetric"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

func (b *bench) run(requests ...*assemble.Request) {
	for i, r := range requests {
		r.Key = key(i + 1)
		b.Begin(r)
		b.Finish(r)
	}
}

func TestMetricsOfRequests(t *testing.T) {
	b := newBench(t)
	again := streamed()
	again.End += 300 * ms
	b.run(streamed(), unlinked(), again)
	got := b.metrics.collect()

	path := filepath.Join("testdata", "metrics.yaml")
	want, err := golden.ReadMetrics(path)
	require.NoError(t, err)
	require.NoError(t, pmetrictest.CompareMetrics(want, got, pmetrictest.IgnoreResourceMetricsOrder(),
		pmetrictest.IgnoreMetricsOrder(), pmetrictest.IgnoreMetricDataPointsOrder()))
}

// points returns the points of a metric over all resources.
func points(m pmetric.Metrics, name string) (found []pmetric.HistogramDataPoint) {
	for _, rm := range m.ResourceMetrics().All() {
		for _, sm := range rm.ScopeMetrics().All() {
			for _, metric := range sm.Metrics().All() {
				if metric.Name() != name {
					continue
				}
				for _, p := range metric.Histogram().DataPoints().All() {
					found = append(found, p)
				}
			}
		}
	}
	return found
}

func attr(p pmetric.HistogramDataPoint, name string) string {
	if v, ok := p.Attributes().Get(name); ok {
		return v.AsString()
	}
	return ""
}

func TestHistogramsAreCumulative(t *testing.T) {
	b := newBench(t)
	b.run(streamed())
	first := points(b.metrics.collect(), "ebpfllm.request.duration")[0]
	b.run(streamed())
	second := points(b.metrics.collect(), "ebpfllm.request.duration")[0]
	assert.Equal(t, uint64(1), first.Count())
	assert.Equal(t, uint64(2), second.Count())
	assert.InDelta(t, 0.8, second.Sum(), 1e-9)
	assert.Equal(t, first.StartTimestamp(), second.StartTimestamp())
	assert.Equal(t, pcommon.Timestamp(wallStart.Unix(1000*ms)), first.StartTimestamp(), "a series starts with its first request")
	third := points(b.metrics.collect(), "ebpfllm.request.duration")[0]
	assert.Equal(t, uint64(2), third.Count())
	assert.Zero(t, third.Exemplars().Len(), "an exemplar is given once")
}

func TestAValueOnABoundBelongsBelowIt(t *testing.T) {
	h := histogram{counts: make([]uint64, 4), exemplars: make([]exemplar, 4)}
	for _, v := range []float64{0, 1, 1.5, 2, 3, 4} {
		h.record([]float64{1, 2, 3}, v, 0, exemplarIDs{})
	}
	assert.Equal(t, []uint64{2, 2, 1, 1}, h.counts)
	assert.InDelta(t, 0, h.min, 0)
	assert.InDelta(t, 4, h.max, 0)
}

func TestExemplarsNameASpanThatIsExported(t *testing.T) {
	tests := []struct {
		name          string
		spans, linked bool
		flags         byte
		span          *pcommon.SpanID // nil: none
	}{
		{"own trace", true, false, 0, &pcommon.SpanID{7: 2}},
		{"sampled", true, true, 1, &pcommon.SpanID{7: 1}},
		{"unsampled", true, true, 0, nil},
		{"own trace that goes nowhere", false, false, 0, nil},
		{"the application's span, without a traces pipeline of ours", false, true, 1, &pcommon.SpanID{17, 18, 19, 20, 21, 22, 23, 24}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t)
			b.spans = tt.spans
			r := unlinked()
			if tt.linked {
				r = streamed()
				r.Head.TraceFlags = tt.flags
			}
			b.run(r)
			exemplars := points(b.metrics.collect(), "ebpfllm.request.duration")[0].Exemplars()
			if tt.span == nil {
				assert.Zero(t, exemplars.Len())
				return
			}
			require.Equal(t, 1, exemplars.Len())
			assert.Equal(t, *tt.span, exemplars.At(0).SpanID())
			assert.False(t, exemplars.At(0).TraceID().IsEmpty())
			assert.Equal(t, pcommon.Timestamp(wallStart.Unix(r.End)), exemplars.At(0).Timestamp())
		})
	}
}

func TestAStageThatIsUnavailableHasNoSeries(t *testing.T) {
	b := newBench(t)
	b.run(unlinked())
	stages := map[string]bool{}
	for _, p := range points(b.metrics.collect(), "ebpfllm.request.stage.duration") {
		stages[attr(p, "ebpfllm.stage")] = true
	}
	assert.Len(t, stages, len(stage.All())-2)
	assert.NotContains(t, stages, "page_fault")
	assert.NotContains(t, stages, "qdisc")
	assert.Contains(t, stages, "lock", "measured, and zero")
}

func TestGenAIMetricsAreOfLLMPathsOnly(t *testing.T) {
	b := newBench(t)
	whole, failed := streamed(), streamed()
	whole.Streaming = false
	failed.Status = 500
	b.run(unlinked(), whole, failed)
	got := b.metrics.collect()
	errors := map[string]uint64{}
	for _, p := range points(got, "gen_ai.server.request.duration") {
		assert.Equal(t, "chat", attr(p, "gen_ai.operation.name"))
		errors[attr(p, "error.type")] = p.Count()
	}
	assert.Equal(t, map[string]uint64{"": 1, "500": 1}, errors)
	assert.Empty(t, points(got, "gen_ai.server.time_to_first_token"), "of successful streams only")

	b.run(streamed())
	first := points(b.metrics.collect(), "gen_ai.server.time_to_first_token")
	require.Len(t, first, 1)
	assert.InDelta(t, 0.1, first[0].Sum(), 1e-9)
}

func TestAProcessThatEndedIsExportedOnceMore(t *testing.T) {
	b := newBench(t)
	b.run(streamed())
	b.processes[10].gone = true
	assert.Equal(t, 1, b.metrics.collect().ResourceMetrics().Len())
	assert.Zero(t, b.metrics.collect().ResourceMetrics().Len())
}

func TestSeriesAreBounded(t *testing.T) {
	b := newBench(t)
	for i := range 2 * maxSeries {
		r := streamed()
		r.Status = 100 + i // a hostile server
		b.run(r)
	}
	var series, counted uint64
	overflow := false
	got := b.metrics.collect()
	for _, p := range points(got, "ebpfllm.request.duration") {
		series++
		counted += p.Count()
		_, over := p.Attributes().Get("otel.metric.overflow")
		overflow = overflow || over
	}
	assert.LessOrEqual(t, series, uint64(maxSeries+1))
	assert.Equal(t, uint64(2*maxSeries), counted, "nothing is lost but the attributes")
	assert.True(t, overflow)
}

func TestProcessesAreBounded(t *testing.T) {
	b := newBench(t)
	for range maxMetricProcesses + 3 {
		b.processes[10] = &process{}
		b.run(streamed())
	}
	assert.Len(t, b.metrics.processes, maxMetricProcesses)
	assert.Equal(t, uint64(3), b.metrics.refused)
}

func BenchmarkCollect(b *testing.B) {
	m := newMetricStore(func() uint64 { return 0 })
	for i := range 16 {
		p := &process{}
		p.PID = uint32(i)
		for s := range 5 {
			r := streamed()
			r.Head.Path = []string{"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/x", "/generate"}[s]
			m.record(p, r, 1, 2, exemplarIDs{})
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		m.collect()
	}
}
