package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/open-telemetry/opentelemetry-collector-contrib/processor/tailsamplingprocessor"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/processor"
	"go.opentelemetry.io/collector/processor/processortest"

	"github.com/ebpfllm/ebpfllm/processor/spikesamplingprocessor"
)

// contender is a processor and the configuration with which it has to keep the
// slow and the failed traces of the load and no others.
type contender struct {
	name    string
	factory processor.Factory
	config  map[string]any
}

func contenders() []contender {
	failed := map[string]any{"name": "failed", "type": "status_code", "status_code": map[string]any{"status_codes": []any{"ERROR"}}}
	return []contender{
		{"spike_sampling", spikesamplingprocessor.NewFactory(), map[string]any{
			"decision_wait": "300s", "decision_wait_after_root_received": "300s", "max_buffer_mib": 8192,
			"policies": []any{map[string]any{"name": "spikes", "type": "spike", "spike": map[string]any{"max_traces_per_cluster": 0}}, failed},
		}},
		{"tail_sampling", tailsamplingprocessor.NewFactory(), map[string]any{
			"decision_wait": "300s", "num_traces": 10_000_000,
			"policies": []any{map[string]any{"name": "slow", "type": "latency", "latency": map[string]any{"threshold_ms": 500}}, failed},
		}},
	}
}

const (
	spansPerTrace = 8
	spansPerBatch = 1024
	batches       = 128 // a multiple of spansPerTrace
	repetitions   = 5
)

const (
	inScattered         = "scattered over 8 services"
	throughput          = "processor throughput, "
	throughputScattered = throughput + inScattered
)

// measureProcessors puts the same load on each contender in turn, so that what
// else the machine does falls on all of them. CPU time is that of the whole
// process, garbage collection included, on one processor.
func measureProcessors(ctx context.Context, rep *report) error {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for _, scattered := range []bool{true, false} {
		layout := "contiguous"
		if scattered {
			layout = inScattered
		}
		speed, held := map[string][]float64{}, map[string][]float64{}
		for range repetitions {
			for _, c := range contenders() {
				spansPerSecond, bytesPerTrace, err := runProcessor(ctx, c, scattered)
				if err != nil {
					return fmt.Errorf("processor %s, %s: %w", c.name, layout, err)
				}
				speed[c.name] = append(speed[c.name], spansPerSecond)
				held[c.name] = append(held[c.name], bytesPerTrace)
			}
		}
		for _, m := range []struct {
			name, unit string
			values     map[string][]float64
			more       bool
		}{
			{throughput + layout, "spans/CPU s", speed, true},
			{"processor buffer, " + layout, "bytes/trace", held, false},
		} {
			rows := make([]row, 0, 2)
			for _, c := range contenders() {
				rows = append(rows, row{Name: m.name, Subject: c.name, Value: median(m.values[c.name]), Unit: m.unit})
			}
			rows[0].compare(rows[1], m.more)
			rep.Rows = append(rep.Rows, rows...)
		}
	}
	return nil
}

// runProcessor returns the spans per CPU second of taking the load in and
// deciding on all of it, and the live heap for each trace while undecided. It
// fails unless exactly the slow and the failed traces were kept, whole.
func runProcessor(ctx context.Context, c contender, scattered bool) (spansPerSecond, bytesPerTrace float64, err error) {
	sink := new(consumertest.TracesSink)
	cfg := c.factory.CreateDefaultConfig()
	if err := confmap.NewFromStringMap(maps.Clone(c.config)).Unmarshal(cfg); err != nil {
		return 0, 0, err
	}
	if v, ok := cfg.(interface{ Validate() error }); ok {
		if err := v.Validate(); err != nil {
			return 0, 0, err
		}
	}
	p, err := c.factory.CreateTraces(ctx, processortest.NewNopSettings(c.factory.Type()), cfg, sink)
	if err != nil {
		return 0, 0, err
	}
	if err := p.Start(ctx, componenttest.NewNopHost()); err != nil {
		return 0, 0, err
	}
	empty := liveHeap()
	load, want, err := makeLoad(scattered)
	if err != nil {
		return 0, 0, err
	}
	runtime.GC()

	from := cpuTime()
	for i, td := range load {
		if err := p.ConsumeTraces(ctx, td); err != nil {
			return 0, 0, err
		}
		load[i] = ptrace.Traces{}
	}
	time.Sleep(time.Second) // until what is queued is buffered
	took := cpuTime() - from
	full := liveHeap()

	from = cpuTime()
	if err := p.Shutdown(ctx); err != nil {
		return 0, 0, err
	}
	took += cpuTime() - from

	if err := checkKept(sink, want); err != nil {
		return 0, 0, err
	}
	const spans = batches * spansPerBatch
	return spans / took.Seconds(), float64(full-empty) / (spans / spansPerTrace), nil
}

func liveHeap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // sync.Pool keeps its victims for one cycle
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func checkKept(sink *consumertest.TracesSink, want map[pcommon.TraceID]bool) error {
	spans := map[pcommon.TraceID]int{}
	for _, td := range sink.AllTraces() {
		for _, rs := range td.ResourceSpans().All() {
			for _, ss := range rs.ScopeSpans().All() {
				for _, s := range ss.Spans().All() {
					spans[s.TraceID()]++
				}
			}
		}
	}
	for id, n := range spans {
		if !want[id] {
			return fmt.Errorf("kept trace %s, which is neither slow nor failed", id)
		}
		if n != spansPerTrace {
			return fmt.Errorf("kept %d of %d spans of trace %s", n, spansPerTrace, id)
		}
	}
	if len(spans) != len(want) {
		return fmt.Errorf("kept %d traces, want %d", len(spans), len(want))
	}
	return nil
}

// makeLoad makes the batches, and the ids of the 2 % of traces that must be
// kept. A batch comes from one service. Contiguous, it holds whole traces;
// scattered, it holds one span each of 1024 traces, and eight batches from
// eight services make those traces whole.
//
// Each batch goes through the wire format, so that its strings have memory of
// their own as they have after a receiver.
func makeLoad(scattered bool) ([]ptrace.Traces, map[pcommon.TraceID]bool, error) {
	g := newLoadMaker()
	var marshaler ptrace.ProtoMarshaler
	var unmarshaler ptrace.ProtoUnmarshaler
	load := make([]ptrace.Traces, 0, batches)
	add := func(td ptrace.Traces) error {
		b, err := marshaler.MarshalTraces(td)
		if err != nil {
			return err
		}
		td, err = unmarshaler.UnmarshalTraces(b)
		load = append(load, td)
		return err
	}
	for len(load) < batches {
		if !scattered {
			td, spans := newBatch(0)
			for range spansPerBatch / spansPerTrace {
				t := g.newTrace()
				for i := range spansPerTrace {
					g.fillSpan(spans.AppendEmpty(), &t, i)
				}
			}
			if err := add(td); err != nil {
				return nil, nil, err
			}
			continue
		}
		traces := make([]loadTrace, spansPerBatch)
		for i := range traces {
			traces[i] = g.newTrace()
		}
		for i := range spansPerTrace {
			td, spans := newBatch(i)
			for k := range traces {
				g.fillSpan(spans.AppendEmpty(), &traces[k], i)
			}
			if err := add(td); err != nil {
				return nil, nil, err
			}
		}
	}
	return load, g.keep, nil
}

type loadMaker struct {
	*rand.Rand
	start time.Time
	n     int
	keep  map[pcommon.TraceID]bool
}

type loadTrace struct {
	id           pcommon.TraceID
	spans        [spansPerTrace]pcommon.SpanID
	start        time.Time
	slow, failed bool
}

func newLoadMaker() *loadMaker {
	return &loadMaker{rand.New(rand.NewPCG(1, 1)), time.Now().Add(-time.Minute), 0, map[pcommon.TraceID]bool{}}
}

// newTrace makes every hundredth trace slow and every hundredth failed. Traces
// begin 1 ms after each other.
func (g *loadMaker) newTrace() loadTrace {
	t := loadTrace{start: g.start.Add(time.Duration(g.n) * time.Millisecond), slow: g.n%100 == 0, failed: g.n%100 == 50}
	g.n++
	binary.BigEndian.PutUint64(t.id[:8], g.Uint64())
	binary.BigEndian.PutUint64(t.id[8:], g.Uint64())
	for i := range t.spans {
		binary.BigEndian.PutUint64(t.spans[i][:], g.Uint64())
	}
	if t.slow || t.failed {
		g.keep[t.id] = true
	}
	return t
}

func newBatch(service int) (ptrace.Traces, ptrace.SpanSlice) {
	td := ptrace.NewTraces()
	rs := td.ResourceSpans().AppendEmpty()
	a := rs.Resource().Attributes()
	a.PutStr("service.name", fmt.Sprintf("service-%d", service))
	a.PutStr("service.instance.id", "3f1c8c7e-52f4-4b6e-9a3f-0d1b1a2c3d4e")
	a.PutStr("k8s.namespace.name", "default")
	a.PutStr("k8s.pod.name", "service-5d4f8c7b9-abcde")
	a.PutStr("telemetry.sdk.language", "go")
	ss := rs.ScopeSpans().AppendEmpty()
	ss.Scope().SetName("bench")
	ss.Spans().EnsureCapacity(spansPerBatch)
	return td, ss.Spans()
}

// fillSpan makes span i of a trace, each the child of the one before, with ten
// attributes as the HTTP conventions give. Spans take 20 to 120 ms, the slow
// one a second more.
func (g *loadMaker) fillSpan(s ptrace.Span, t *loadTrace, i int) {
	s.SetTraceID(t.id)
	s.SetSpanID(t.spans[i])
	if i > 0 {
		s.SetParentSpanID(t.spans[i-1])
	}
	s.SetName("POST /v1/chat/completions")
	s.SetKind(ptrace.SpanKindServer)
	d := time.Duration(20+g.IntN(100)) * time.Millisecond
	if t.slow && i == 3 {
		d += time.Second
	}
	s.SetStartTimestamp(pcommon.NewTimestampFromTime(t.start))
	s.SetEndTimestamp(pcommon.NewTimestampFromTime(t.start.Add(d)))
	if t.failed && i == spansPerTrace-1 {
		s.Status().SetCode(ptrace.StatusCodeError)
	}
	a := s.Attributes()
	a.EnsureCapacity(10)
	a.PutStr("http.request.method", "POST")
	a.PutStr("url.path", "/v1/chat/completions")
	a.PutStr("url.scheme", "https")
	a.PutStr("server.address", "inference.default.svc")
	a.PutInt("server.port", 8443)
	a.PutInt("http.response.status_code", 200)
	a.PutStr("network.protocol.version", "1.1")
	a.PutStr("user_agent.original", "python-requests/2.31.0")
	a.PutStr("client.address", "10.1.2.3")
	a.PutStr("thread.name", "worker-7")
}
