package spikesamplingprocessor

import (
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/sampling"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/processor/processortest"

	"github.com/ebpfllm/ebpfllm/processor/spikesamplingprocessor/internal/metadata"
)

func TestIDsInAPathMakeNoOperationsOfTheirOwn(t *testing.T) {
	for path, want := range map[string]string{
		"":                            "unknown",
		"/":                           "/",
		"/v1/chat/completions":        "/v1/chat/completions",
		"/v2/models/llama3/infer":     "/v2/models/*/infer",
		"/users/12345":                "/users/*",
		"/x/9c1185a5-c5e9-4b8f":       "/x/*",
		"/" + strings.Repeat("x", 41): "/*",
		"/" + strings.Repeat("x", 40): "/" + strings.Repeat("x", 40),
		"/a/b/c/d/e/f/g/h/i":          "/a/b/c/d/e/f/*",
		"/v1234/x":                    "/*/x",
		"no/slash":                    "no/slash",
		strings.Repeat("/", 10_000):   "///////*",
	} {
		assert.Equal(t, want, routeOf(path), path)
	}
}

func TestTheOperationIsTheFirstOfItsSources(t *testing.T) {
	attrs := map[string]any{"url.path": "/a/1", "http.route": "/a/{id}", "gen_ai.operation.name": "chat"}
	read := func() string {
		m := pcommon.NewMap()
		require.NoError(t, m.FromRaw(attrs))
		return readMeasures(m).operation
	}
	assert.Equal(t, "chat", read())
	delete(attrs, "gen_ai.operation.name")
	assert.Equal(t, "/a/{id}", read())
	delete(attrs, "http.route")
	assert.Equal(t, "/a/*", read())
	delete(attrs, "url.path")
	assert.Equal(t, "unknown", read())
}

func TestOnlyStagesOfTheContractAreRead(t *testing.T) {
	m := pcommon.NewMap()
	m.PutDouble("ebpfllm.stage.lock", 1)
	m.PutDouble("ebpfllm.socket.send_buffer", 2)
	m.PutDouble("ebpfllm.socket.lock", 3)       // lock has no plain total
	m.PutDouble("ebpfllm.stage.nonsense", 4)    // no stage
	m.PutStr("ebpfllm.stage.cpu", "5")          // no number
	m.PutDouble("ebpfllm.stage.unknown", 6)     // never exported
	m.PutDouble("ebpfllm.page_fault.major", 7)  // evidence, no stage
	m.PutDouble("ebpfllm.waker.lock", 8)        // a part of ebpfllm.stage.lock
	m.PutStr("ebpfllm.stages.unavailable", "x") // no list
	var names []string
	for _, v := range readMeasures(m).values {
		names = append(names, fmt.Sprint(v.series.name, v.seconds))
	}
	assert.Equal(t, []string{"lock1", "socket.send_buffer2"}, names)
}

func TestOperationsAreBounded(t *testing.T) {
	o := newOperations(1000)
	for i := range 10_000 {
		o.name(operationKey{service: "svc", name: fmt.Sprint("/", i), kernel: true}, int64(i))
	}
	assert.Len(t, o.names, maxOperations)
	assert.Equal(t, "/0", o.name(operationKey{service: "svc", name: "/0", kernel: true}, 20_000), "those that were there stay")
	assert.Equal(t, otherOperation, o.name(operationKey{service: "svc", name: "/9999", kernel: true}, 20_000))
	for i := range 10_000 {
		o.name(operationKey{service: strconv.Itoa(i), name: "x"}, 20_000)
	}
	assert.Len(t, o.names, 1000, "over all services too")
	o.expire(15_000)
	assert.Equal(t, "/9999", o.name(operationKey{service: "svc", name: "/9999", kernel: true}, 20_000), "those not seen for long made room")
	assert.Equal(t, otherOperation, o.name(operationKey{service: "svc", name: "*", kernel: true}, 20_000), "the name of all is taken")
	assert.Len(t, o.name(operationKey{service: "svc", name: strings.Repeat("x", 1000), kernel: true}, 20_000), maxName)
}

// Spans go out as they came in, but for what this processor adds.
func TestSpansSurviveTheBufferUnchanged(t *testing.T) {
	td := ptrace.NewTraces()
	for r := range 2 {
		rs := td.ResourceSpans().AppendEmpty()
		rs.SetSchemaUrl("https://example.com/resource")
		rs.Resource().Attributes().PutStr("service.name", fmt.Sprint("svc", r))
		rs.Resource().SetDroppedAttributesCount(3)
		for s := range 2 {
			ss := rs.ScopeSpans().AppendEmpty()
			ss.SetSchemaUrl("https://example.com/scope")
			ss.Scope().SetName(fmt.Sprint("scope", s))
			ss.Scope().SetVersion("1.2.3")
			sp := ss.Spans().AppendEmpty()
			sp.SetTraceID(traceID(1))
			sp.SetSpanID(spanID(uint64(1 + 2*r + s)))
			sp.SetName("x")
			sp.SetStartTimestamp(1)
			sp.SetEndTimestamp(pcommon.Timestamp(5 * time.Second))
			sp.SetFlags(0x101)
			sp.Attributes().PutEmptyBytes("bytes").FromRaw([]byte{1, 2})
			e := sp.Events().AppendEmpty()
			e.SetName("event")
			e.Attributes().PutInt("n", 1)
			l := sp.Links().AppendEmpty()
			l.SetTraceID(traceID(7))
			l.TraceState().FromRaw("a=b")
			sp.Status().SetMessage("message")
			sp.SetDroppedLinksCount(4)
		}
	}
	want := ptrace.NewTraces()
	td.CopyTo(want)
	h := newHarness(t, func(c *Config) { c.DryRun = true })
	h.send(td)
	h.pass(10 * time.Second)
	require.Len(t, h.sink.AllTraces(), 1)
	got := h.sink.AllTraces()[0]
	for _, rs := range got.ResourceSpans().All() {
		for _, ss := range rs.ScopeSpans().All() {
			for _, sp := range ss.Spans().All() {
				sp.Attributes().RemoveIf(func(k string, _ pcommon.Value) bool { return strings.HasPrefix(k, "spike.") })
			}
		}
	}
	var m ptrace.ProtoMarshaler
	wantBytes, err := m.MarshalTraces(want)
	require.NoError(t, err)
	gotBytes, err := m.MarshalTraces(got)
	require.NoError(t, err)
	assert.Equal(t, wantBytes, gotBytes)
}

func TestManySendersAtOnce(t *testing.T) {
	sink := new(consumertest.TracesSink)
	cfg := defaultConfig()
	cfg.Policies = []PolicyConfig{{Name: "all", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: 100}}}
	cfg.DecisionWait, cfg.DecisionWaitAfterRootReceived = time.Millisecond, time.Millisecond
	p, err := newProcessor(processortest.NewNopSettings(metadata.Type), cfg, sink)
	require.NoError(t, err)
	ticks := make(chan time.Time)
	p.ticks = ticks
	require.NoError(t, p.Start(t.Context(), componenttest.NewNopHost()))
	const senders, each = 4, 300
	var wg sync.WaitGroup
	for s := range uint64(senders) {
		wg.Go(func() {
			for i := range uint64(each) {
				// Each trace gets a span of each sender.
				assert.NoError(t, p.ConsumeTraces(t.Context(), makeTraces(i, app(fmt.Sprint("svc", s), span{id: s + 1, kind: server, to: time.Millisecond}))))
			}
		})
	}
	for range 50 {
		ticks <- time.Time{}
	}
	wg.Wait()
	require.NoError(t, p.Shutdown(t.Context()))
	assert.Equal(t, senders*each, sink.SpanCount(), "each span comes out once: with its trace, or late")
}

// FuzzConsume feeds whatever is OTLP: nothing may panic, leak memory from the
// account, or lose a span that is not counted.
func FuzzConsume(f *testing.F) {
	var m ptrace.ProtoMarshaler
	for _, td := range []ptrace.Traces{
		makeTraces(1, app("a", span{id: 1, kind: server, to: 2 * time.Second, state: "ot=th:8;rv:c0000000000000,x=y"})),
		makeTraces(1, kernel("k", request(2, 1, 0, time.Second, map[string]float64{"stage.lock": 2, "socket.send_buffer": 3}), occurrence(3, 2, "lock", 0, time.Second)),
			app("a", span{id: 4, parent: 1, kind: server, to: time.Second}, span{id: 5, parent: 4, to: time.Second})),
		makeTraces(1, kernel("k", request(2, 2, 0, 0, nil), occurrence(2, 2, "cpu", time.Second, 0))),
	} {
		b, err := m.MarshalTraces(td)
		require.NoError(f, err)
		f.Add(b, "ot=th:8")
	}
	f.Fuzz(func(t *testing.T, data []byte, tracestate string) {
		if got := withThreshold(tracestate, sampling.AlwaysSampleThreshold); len(got) > len(tracestate)+64 {
			t.Errorf("tracestate grew from %d to %d bytes", len(tracestate), len(got))
		}
		td, err := (&ptrace.ProtoUnmarshaler{}).UnmarshalTraces(data)
		if err != nil {
			return
		}
		h := newHarness(t, func(c *Config) { c.DryRun = true })
		n := td.SpanCount()
		copied := ptrace.NewTraces()
		td.CopyTo(copied)
		h.send(td)
		h.send(copied) // all duplicates
		h.pass(time.Second)
		require.NoError(t, h.p.Shutdown(t.Context()))
		dropped := 0
		for _, d := range h.sum("spans_dropped", "reason") {
			dropped += int(d)
		}
		assert.Equal(t, 2*n, h.sink.SpanCount()+dropped)
		assert.Zero(t, h.p.buffer.bytes)
	})
}
