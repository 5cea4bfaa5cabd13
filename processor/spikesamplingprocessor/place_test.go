package spikesamplingprocessor

import (
	"crypto/sha256"
	"flag"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/golden"
	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/pdatatest/ptracetest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

var update = flag.Bool("update", false, "write the golden files anew; read the difference before you commit it")

// placed sends the trace through a processor that keeps all.
func placed(t *testing.T, services ...service) []ptrace.Span {
	t.Helper()
	h := newHarness(t, policies(PolicyConfig{Name: "all", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: 100}}))
	h.send(makeTraces(1, services...))
	require.NoError(t, h.p.Shutdown(t.Context()))
	return h.kept()[traceID(1)]
}

func TestTheKernelsSpansGoWhereTheyBelong(t *testing.T) {
	ms := time.Millisecond
	entry := span{id: 10, parent: 1, name: "POST", kind: server, from: 1 * ms, to: 99 * ms}
	req := request(20, 1, 0, 100*ms, nil)
	tests := []struct {
		name     string
		services []service
		want     map[string]uint64 // parent by name
	}{
		{
			"the request under its entry span, whichever comes first",
			[]service{kernel("k", req), app("a", entry)},
			map[string]uint64{kernelRequest: 10},
		},
		{
			"where there is no entry span it stays",
			[]service{kernel("k", req), app("a", span{id: 10, parent: 2, name: "POST", kind: server, to: 99 * ms})},
			map[string]uint64{kernelRequest: 1, "POST": 2},
		},
		{
			"a SERVER span before another child of the wire's parent",
			[]service{kernel("k", req), app("client", span{id: 9, parent: 1, name: "dns", kind: internal, from: 0, to: 100 * ms}), app("a", entry)},
			map[string]uint64{kernelRequest: 10, "dns": 1},
		},
		{
			"a span with that parent that does not overlap is no entry span",
			[]service{kernel("k", req), app("client", span{id: 9, parent: 1, name: "retry", kind: internal, from: 200 * ms, to: 300 * ms})},
			map[string]uint64{kernelRequest: 1},
		},
		{
			"two requests below one wire parent each under the entry span that covers it",
			[]service{
				kernel("k", req, span{id: 21, parent: 1, name: kernelRequest + "2", from: 0, to: 1}),
				app("a", entry), app("a", span{id: 11, parent: 1, name: "again", kind: server, from: 500 * ms, to: 600 * ms}),
			},
			map[string]uint64{kernelRequest: 10},
		},
		{
			"an occurrence under the innermost span that holds its midpoint",
			[]service{
				kernel("k", req, occurrence(21, 20, "page_fault", 40*ms, 80*ms), occurrence(22, 20, "lock", 90*ms, 98*ms), occurrence(23, 20, "run_queue", 0, 1*ms)),
				app("a", entry,
					span{id: 11, parent: 10, name: "generate", kind: internal, from: 5 * ms, to: 85 * ms},
					span{id: 12, parent: 11, name: "step1", kind: internal, from: 10 * ms, to: 50 * ms},
					span{id: 13, parent: 11, name: "step2", kind: internal, from: 51 * ms, to: 84 * ms},
				),
			},
			map[string]uint64{"page_fault": 13, "lock": 10, "run_queue": 20, kernelRequest: 10, "step2": 11},
		},
		{
			"the shorter of two that run at once",
			[]service{
				kernel("k", req, occurrence(21, 20, "lock", 40*ms, 42*ms)),
				app("a", entry,
					span{id: 11, parent: 10, name: "long", kind: internal, from: 5 * ms, to: 85 * ms},
					span{id: 12, parent: 10, name: "short", kind: internal, from: 30 * ms, to: 50 * ms},
				),
			},
			map[string]uint64{"lock": 12},
		},
		{
			"not under a span of another service",
			[]service{
				kernel("k", req, occurrence(21, 20, "lock", 40*ms, 42*ms)),
				app("a", entry, span{id: 11, parent: 10, name: "call", kind: client, from: 30 * ms, to: 50 * ms}),
				app("b", span{id: 12, parent: 11, name: "remote", kind: server, from: 31 * ms, to: 49 * ms}),
			},
			map[string]uint64{"lock": 11},
		},
		{
			"no cycle from an entry span that is its own parent",
			[]service{kernel("k", request(20, 10, 0, 100*ms, nil)), app("a", span{id: 10, parent: 10, name: "POST", kind: server, to: 99 * ms})},
			map[string]uint64{kernelRequest: 10, "POST": 10},
		},
		{
			"nor from a request that is its own parent",
			[]service{kernel("k", request(20, 20, 0, 100*ms, nil)), app("a", span{id: 10, parent: 20, name: "POST", kind: server, to: 99 * ms})},
			map[string]uint64{kernelRequest: 20, "POST": 20},
		},
		{
			"nor from an application span below an occurrence",
			[]service{
				kernel("k", req, occurrence(21, 20, "lock", 40*ms, 42*ms)),
				app("a", entry,
					span{id: 11, parent: 10, name: "loop", kind: internal, from: 30 * ms, to: 50 * ms},
					span{id: 21, parent: 11, name: "same id as the occurrence", kind: internal, from: 35 * ms, to: 45 * ms},
				),
			},
			map[string]uint64{kernelRequest: 10, "lock": 20},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			spans := placed(t, tt.services...)
			for name, parent := range tt.want {
				assert.Equal(t, spanID(parent), named(t, spans, name).ParentSpanID(), name)
			}
			for _, s := range spans {
				if s.Name() == kernelRequest {
					assert.Equal(t, internal, s.Kind())
				}
			}
		})
	}
}

func TestOutsideParentIsTheOverhang(t *testing.T) {
	ms := time.Millisecond
	spans := placed(t,
		kernel("k", request(20, 1, 0, 100*ms, nil)),
		app("a", span{id: 10, parent: 1, name: "POST", kind: server, from: 3 * ms, to: 98 * ms}))
	r := named(t, spans, kernelRequest).Attributes()
	for key, want := range map[string]float64{attrOutside: 0.005, attrOutsideBefore: 0.003, attrOutsideAfter: 0.002} {
		v, ok := r.Get(key)
		require.True(t, ok, key)
		assert.InDelta(t, want, v.Double(), 1e-9, key)
	}
}

func TestAHugeFlatTraceIsPlacedInReasonableTime(t *testing.T) {
	ms := time.Millisecond
	k := kernel("k", request(1_000_000, 1, 0, 100*ms, nil))
	a := app("a", span{id: 10, parent: 1, name: "POST", kind: server, to: 100 * ms})
	for i := range uint64(20_000) {
		at := time.Duration(i) * 4 * time.Microsecond
		a.spans = append(a.spans, span{id: 100 + i, parent: 10, kind: internal, from: at, to: 100 * ms})
		k.spans = append(k.spans, occurrence(2_000_000+i, 1_000_000, "lock", at, at+ms))
	}
	spans := placed(t, k, a)
	assert.Len(t, spans, 40_002)
}

// The goldens show whole traces as the next component gets them.
func TestGoldens(t *testing.T) {
	ms := time.Millisecond
	usual := map[string]float64{"stage.page_fault": 0, "stage.cpu": 0.02, "stage.wait": 0.05, "stage.unattributed": 0, "page_fault.major": 0}
	tests := []struct {
		name   string
		traces func(at time.Duration) []ptrace.Traces
	}{
		{"lone_page_fault", func(at time.Duration) []ptrace.Traces {
			req := request(0x20, 0x1, at, at+400*ms, map[string]float64{"stage.page_fault": 0.3, "stage.cpu": 0.02, "stage.wait": 0.08, "stage.unattributed": 0, "page_fault.major": 0.29})
			return []ptrace.Traces{
				makeTraces(1, kernel("llm", occurrence(0x21, 0x20, "page_fault", at+50*ms, at+350*ms))),
				makeTraces(1, kernel("llm", req)),
				makeTraces(1, app("llm",
					span{id: 0x10, parent: 0x1, name: "POST /v1/chat/completions", kind: server, from: at + ms, to: at + 399*ms, state: "vendor=1"},
					span{id: 0x11, parent: 0x10, name: "generate", kind: internal, from: at + 2*ms, to: at + 398*ms},
				)),
			}
		}},
		{"uninstrumented", func(at time.Duration) []ptrace.Traces {
			req := request(0x20, 0, at, at+400*ms, map[string]float64{"stage.page_fault": 0.3, "stage.cpu": 0.02, "stage.wait": 0.08, "stage.unattributed": 0, "page_fault.major": 0})
			return []ptrace.Traces{
				makeTraces(1, kernel("llm", occurrence(0x21, 0x20, "page_fault", at+50*ms, at+350*ms))),
				makeTraces(1, kernel("llm", req)),
			}
		}},
		{"shared_stall", func(at time.Duration) (tds []ptrace.Traces) {
			// of 40 requests that one stall delayed, two whose spans came to this collector
			for i, path := range []string{"/v1/chat/completions", "/v1/models"} {
				from := at + time.Duration(i)*10*ms
				stalled := (at + 350*ms - max(from, at+50*ms)).Seconds()
				req := request(0x20, 0, from, from+400*ms, map[string]float64{"stage.page_fault": stalled, "stage.cpu": 0.02, "stage.wait": 0.38 - stalled, "stage.unattributed": 0, "page_fault.major": stalled})
				req.attrs["gen_ai.operation.name"], req.attrs["url.path"] = "", path
				stall := occurrence(0x21, 0x20, "page_fault", max(from, at+50*ms), at+350*ms)
				stall.attrs["ebpfllm.link.method"], stall.attrs[attrSharedBy] = "shared", 40
				td := makeTraces(uint64(1+i), kernel("llm", req, stall))
				s := td.ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(1)
				link := s.Links().AppendEmpty()
				link.SetTraceID(traceID(uint64(2 - i)))
				link.SetSpanID(spanID(0x20))
				link.SetFlags(3)
				s.SetDroppedLinksCount(38)
				tds = append(tds, td)
			}
			return tds
		}},
		{"burst", func(at time.Duration) (tds []ptrace.Traces) {
			for i := range uint64(6) {
				from := at + time.Duration(i)*50*ms
				req := request(0x20, 0, from, from+400*ms, map[string]float64{"stage.page_fault": 0.3, "stage.cpu": 0.02, "stage.wait": 0.08, "stage.unattributed": 0, "page_fault.major": 0.3})
				tds = append(tds, makeTraces(1+i, kernel("llm", req, occurrence(0x21, 0x20, "page_fault", from+50*ms, from+350*ms))))
			}
			return tds
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := newHarness(t, nil)
			h.warm(usual)
			at := h.clock.Sub(epoch)
			h.pass(time.Second)
			h.send(tt.traces(at)...)
			h.pass(20 * time.Second)
			got := ptrace.NewTraces()
			for _, td := range h.sink.AllTraces() {
				td.ResourceSpans().MoveAndAppendTo(got.ResourceSpans())
			}
			file := filepath.Join("testdata", "golden", tt.name+".yaml")
			if *update {
				require.NoError(t, golden.WriteTraces(t, file, got)) // fails the test, as it should
			}
			want, err := golden.ReadTraces(file)
			require.NoError(t, err)
			require.NoError(t, ptracetest.CompareTraces(want, got))
		})
	}
}

func TestTheSameInputGivesTheSameOutput(t *testing.T) {
	run := func() [32]byte {
		h := newHarness(t, nil)
		h.warm(map[string]float64{"stage.lock": 0})
		for i := range uint64(8) {
			h.send(h.slow(1+i, map[string]float64{"stage.lock": 0.3, "stage.page_fault": 0.2}))
			h.pass(tickInterval)
		}
		require.NoError(t, h.p.Shutdown(t.Context()))
		var out strings.Builder
		for _, td := range h.sink.AllTraces() {
			b, err := (&ptrace.JSONMarshaler{}).MarshalTraces(td)
			require.NoError(t, err)
			out.Write(b)
		}
		require.Contains(t, out.String(), attrClusterID)
		return sha256.Sum256([]byte(out.String()))
	}
	first := run()
	assert.Equal(t, first, run())
}
