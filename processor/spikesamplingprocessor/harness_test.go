package spikesamplingprocessor

import (
	"context"
	"encoding/binary"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/processor"
	"go.opentelemetry.io/collector/processor/processortest"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/ebpfllm/ebpfllm/processor/spikesamplingprocessor/internal/metadata"
)

// epoch is when the tests begin.
var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// harness runs a processor by a clock of its own.
type harness struct {
	tb        testing.TB
	p         *spikeSampling
	sink      *consumertest.TracesSink
	telemetry *componenttest.Telemetry
	clock     time.Time
	blocks    bool // what follows blocks, on purpose: a tick does not wait for it
}

func newHarness(tb testing.TB, change func(*Config)) *harness {
	tb.Helper()
	return newHarnessTo(tb, change, new(consumertest.TracesSink))
}

func newHarnessTo(tb testing.TB, change func(*Config), next consumer.Traces) *harness {
	tb.Helper()
	return newHarnessOn(tb, change, componenttest.NewNopHost(), next)
}

// newHarnessOn starts a processor on the host, before a sink if next is left out.
func newHarnessOn(tb testing.TB, change func(*Config), on component.Host, next ...consumer.Traces) *harness {
	tb.Helper()
	if len(next) == 0 {
		next = append(next, new(consumertest.TracesSink))
	}
	cfg := defaultConfig()
	if change != nil {
		change(cfg)
	}
	require.NoError(tb, cfg.Validate())
	h := &harness{tb: tb, clock: epoch, telemetry: componenttest.NewTelemetry()}
	h.sink, _ = next[0].(*consumertest.TracesSink)
	set := processor.Settings{
		ID:                component.NewID(metadata.Type),
		TelemetrySettings: h.telemetry.NewTelemetrySettings(),
		BuildInfo:         processortest.NewNopSettings(metadata.Type).BuildInfo,
	}
	p, err := newProcessor(set, cfg, next[0])
	require.NoError(tb, err)
	p.now = func() time.Time { return h.clock }
	p.ticks = make(chan time.Time) // never: the test ticks
	p.early = nil                  // and hands on
	h.p = p
	require.NoError(tb, p.Start(tb.Context(), on))
	tb.Cleanup(func() {
		require.NoError(tb, p.Shutdown(context.Background()))
		require.NoError(tb, h.telemetry.Shutdown(context.Background()))
	})
	return h
}

// newTestProcessor makes a processor that is not started.
func newTestProcessor(tb testing.TB, cfg *Config, next consumer.Traces) *spikeSampling {
	tb.Helper()
	p, err := newProcessor(processortest.NewNopSettings(metadata.Type), cfg, next)
	require.NoError(tb, err)
	return p
}

// send hands spans to the processor at the present time.
func (h *harness) send(tds ...ptrace.Traces) {
	h.tb.Helper()
	for _, td := range tds {
		require.NoError(h.tb, h.p.ConsumeTraces(h.tb.Context(), td))
	}
}

// pass lets time pass, with a tick every 100 ms.
func (h *harness) pass(d time.Duration) {
	for end := h.clock.Add(d); h.clock.Before(end); {
		h.clock = h.clock.Add(min(tickInterval, end.Sub(h.clock)))
		h.p.tick()
		if !h.blocks {
			h.p.drain()
		}
	}
}

// span describes a span to be made.
type span struct {
	id, parent uint64
	name       string
	kind       ptrace.SpanKind
	from, to   time.Duration // since epoch
	attrs      map[string]any
	status     ptrace.StatusCode
	state      string // tracestate
	remote     bool
}

// service is a resource with one scope.
type service struct {
	name  string
	scope string
	spans []span
}

func app(name string, spans ...span) service    { return service{name, "app", spans} }
func kernel(name string, spans ...span) service { return service{name, kernelScope, spans} }

// request describes a kernel.request.
func request(id, parent uint64, from, to time.Duration, stages map[string]float64) span {
	attrs := map[string]any{
		"ebpfllm.link.method": "traceparent", "ebpfllm.incomplete": false,
		"gen_ai.operation.name": "chat", "url.path": "/v1/chat/completions",
	}
	for k, v := range stages {
		attrs["ebpfllm."+k] = v
	}
	s := span{id: id, parent: parent, name: kernelRequest, kind: ptrace.SpanKindInternal, from: from, to: to, attrs: attrs}
	if parent == 0 {
		s.kind = ptrace.SpanKindServer
	}
	return s
}

// occurrence describes a stage's occurrence.
func occurrence(id, request uint64, stage string, from, to time.Duration) span {
	return span{
		id: id, parent: request, name: stage, kind: ptrace.SpanKindInternal, from: from, to: to,
		attrs: map[string]any{attrStage: stage, "ebpfllm.link.method": "traceparent", "ebpfllm.incomplete": false},
	}
}

func traceID(n uint64) (id pcommon.TraceID) {
	binary.BigEndian.PutUint64(id[:8], 0x1234567800000000|n)
	binary.BigEndian.PutUint64(id[8:], n*0x9e3779b97f4a7c15)
	return id
}

func spanID(n uint64) (id pcommon.SpanID) {
	binary.BigEndian.PutUint64(id[:], n)
	return id
}

func makeTraces(trace uint64, services ...service) ptrace.Traces {
	td := ptrace.NewTraces()
	for _, s := range services {
		rs := td.ResourceSpans().AppendEmpty()
		rs.Resource().Attributes().PutStr("service.name", s.name)
		ss := rs.ScopeSpans().AppendEmpty()
		ss.Scope().SetName(s.scope)
		for _, d := range s.spans {
			sp := ss.Spans().AppendEmpty()
			sp.SetTraceID(traceID(trace))
			sp.SetSpanID(spanID(d.id))
			sp.SetParentSpanID(spanID(d.parent))
			sp.SetName(d.name)
			sp.SetKind(d.kind)
			sp.SetStartTimestamp(pcommon.NewTimestampFromTime(epoch.Add(d.from)))
			sp.SetEndTimestamp(pcommon.NewTimestampFromTime(epoch.Add(d.to)))
			sp.Status().SetCode(d.status)
			sp.TraceState().FromRaw(d.state)
			if d.remote {
				sp.SetFlags(flagsRemote)
			}
			for _, k := range slices.Sorted(maps.Keys(d.attrs)) {
				if err := sp.Attributes().PutEmpty(k).FromRaw(d.attrs[k]); err != nil {
					panic(err)
				}
			}
		}
	}
	return td
}

// kept returns what the next component got, by trace.
func (h *harness) kept() map[pcommon.TraceID][]ptrace.Span {
	spans := map[pcommon.TraceID][]ptrace.Span{}
	for _, td := range h.sink.AllTraces() {
		for _, rs := range td.ResourceSpans().All() {
			for _, ss := range rs.ScopeSpans().All() {
				for _, sp := range ss.Spans().All() {
					spans[sp.TraceID()] = append(spans[sp.TraceID()], sp)
				}
			}
		}
	}
	return spans
}

func str(s ptrace.Span, key string) string {
	if v, ok := s.Attributes().Get(key); ok {
		return v.AsString()
	}
	return ""
}

// named returns the span with the name.
func named(tb testing.TB, spans []ptrace.Span, name string) ptrace.Span {
	tb.Helper()
	for _, s := range spans {
		if s.Name() == name {
			return s
		}
	}
	require.Failf(tb, "no such span", "%q among %d spans", name, len(spans))
	return ptrace.Span{}
}

// sum returns the values of a counter or gauge by one attribute.
func (h *harness) sum(name, key string) map[string]int64 {
	h.tb.Helper()
	values := map[string]int64{}
	m, err := h.telemetry.GetMetric("otelcol_processor_spike_sampling_" + name)
	if err != nil {
		return values // never recorded
	}
	var points []metricdata.DataPoint[int64]
	switch d := m.Data.(type) {
	case metricdata.Sum[int64]:
		points = d.DataPoints
	case metricdata.Gauge[int64]:
		points = d.DataPoints
	default:
		require.Failf(h.tb, "unexpected metric", "%s is a %T", name, m.Data)
	}
	for _, p := range points {
		v, _ := p.Attributes.Value(attribute.Key(key))
		values[v.AsString()] += p.Value
	}
	return values
}

// stepNow makes a step and publishes it.
func stepNow(c *clusters, now int64) stepResult {
	res := c.step(c.take(), now)
	res.publish()
	return res
}
