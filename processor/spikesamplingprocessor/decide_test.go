package spikesamplingprocessor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer/consumererror"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/processor/processortest"

	"github.com/ebpfllm/ebpfllm/processor/spikesamplingprocessor/internal/metadata"
)

// warm teaches the baseline 200 requests whose stages are as given.
func (h *harness) warm(stages map[string]float64) {
	for i := range uint64(200) {
		at := h.clock.Sub(epoch)
		h.send(makeTraces(1_000_000+i, kernel("llm", request(i<<8|2, i<<8|1, at-100*time.Millisecond, at, stages))))
		h.pass(tickInterval)
	}
	h.pass(10 * time.Second)
	require.Empty(h.tb, h.p.buffer.traces)
}

// slow is a request that ended now in which the stages were as given.
func (h *harness) slow(trace uint64, stages map[string]float64) ptrace.Traces {
	at := h.clock.Sub(epoch)
	return makeTraces(trace, kernel("llm", request(trace<<8|2, trace<<8|1, at-time.Second, at, stages)))
}

func policies(ps ...PolicyConfig) func(*Config) {
	return func(c *Config) { c.Policies = ps }
}

func TestTheStageNamedIsTheOneThatExplainsTheDelay(t *testing.T) {
	usual := map[string]float64{
		"stage.page_fault": 0, "stage.run_queue": 0.001, "stage.lock": 0, "stage.syscall": 0.001, "stage.send_buffer": 0,
		"socket.send_buffer": 0.001, "socket.receive_queue": 0.001, "stage.cpu": 0.02, "stage.wait": 0.2, "stage.unattributed": 0.001,
	}
	tests := []struct {
		name   string
		stages map[string]float64
		want   string
		reason string
	}{
		{"the largest excess, not the longest stage", map[string]float64{"stage.wait": 0.3, "stage.page_fault": 0.2}, "page_fault", "page_fault took 200ms, 200ms above its baseline of 0s"},
		{"of several stalls the one with the largest excess", map[string]float64{"stage.lock": 0.1, "stage.page_fault": 0.3}, "page_fault", "page_fault took"},
		{"a stall before what is left over, when it explains half of it", map[string]float64{"stage.wait": 1.2, "stage.lock": 0.6}, "lock", "lock took"},
		{"but not when it explains little of it", map[string]float64{"stage.wait": 1.2, "stage.lock": 0.1}, "wait", "wait took"},
		{"a slow reader that blocks the writing thread", map[string]float64{"stage.syscall": 0.5, "socket.send_buffer": 0.45}, "send_buffer", "send_buffer (socket total) took 450ms"},
		{"a thread that does not run leaves bytes in the socket", map[string]float64{"stage.run_queue": 0.3, "socket.receive_queue": 0.5}, "run_queue", "run_queue took"},
		{"a system call when nothing else is known", map[string]float64{"stage.syscall": 0.5}, "syscall", "syscall took"},
		{"more cpu than usual", map[string]float64{"stage.cpu": 0.5}, "cpu", "cpu took"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := newHarness(t, nil)
			h.warm(usual)
			stages := maps.Clone(usual)
			maps.Copy(stages, tt.stages)
			h.send(h.slow(1, stages))
			h.pass(10 * time.Second)
			kept := h.kept()
			require.Len(t, kept, 1)
			s := kept[traceID(1)][0]
			assert.Equal(t, tt.want, str(s, attrSpikeStage))
			assert.Contains(t, str(s, attrReason), tt.reason)
			assert.Equal(t, "own", str(s, attrBaselineState))
			assert.Equal(t, "spikes", str(s, attrPolicy))
			assert.True(t, strings.HasPrefix(str(s, attrRootCause), "Inferred: "))
			assert.NotEmpty(t, str(s, attrRecommendation))
			assert.Empty(t, str(s, attrClusterID), "it is alone")
		})
	}
}

func TestAStageThatCouldNotBeMeasuredGivesNoPoint(t *testing.T) {
	h := newHarness(t, nil)
	h.warm(map[string]float64{"stage.lock": 0})
	td := h.slow(1, map[string]float64{"stage.lock": 0.5})
	td.ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(0).Attributes().PutEmptySlice(attrUnavailable).AppendEmpty().SetStr("lock")
	h.send(td)
	h.pass(10 * time.Second)
	assert.Empty(t, h.kept())
}

func TestAnIncompleteRecordMayBeASpikeButTeachesNothing(t *testing.T) {
	h := newHarness(t, nil)
	h.warm(map[string]float64{"stage.lock": 0.001})
	td := h.slow(1, map[string]float64{"stage.lock": 0.5, "stage.page_fault": 0})
	attrs := td.ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(0).Attributes()
	attrs.PutBool(attrIncomplete, true)
	h.send(td)
	h.pass(10 * time.Second)
	assert.Len(t, h.kept(), 1)
	own, warming, _ := h.p.baseline.Stats()
	assert.Equal(t, []int{2, 2}, []int{own, warming}, "lock, its parent; and two series of page_fault without a value")
}

func TestAppliesToApplicationSpansAlone(t *testing.T) {
	h := newHarness(t, nil)
	send := func(trace uint64, inner time.Duration) {
		at := h.clock.Sub(epoch)
		id := trace << 8
		h.send(makeTraces(trace, app("web",
			span{id: id | 2, parent: id | 1, name: "POST /chat", kind: server, from: at - inner - 10*time.Millisecond, to: at},
			span{id: id | 3, parent: id | 2, name: "decode", kind: internal, from: at - inner - 5*time.Millisecond, to: at - 5*time.Millisecond},
			span{id: id | 4, parent: id | 2, name: "tokenize", kind: internal, from: at - 2*time.Millisecond, to: at},
		)))
		h.pass(tickInterval)
	}
	for i := range uint64(200) {
		send(100+i, 50*time.Millisecond)
	}
	send(1, 500*time.Millisecond)
	h.pass(10 * time.Second)
	kept := h.kept()
	require.Len(t, kept, 1)
	entry := named(t, kept[traceID(1)], "POST /chat")
	assert.Equal(t, "span", str(entry, attrSpikeStage))
	assert.Contains(t, str(entry, attrReason), `span "decode (internal)" took 500ms`, "the innermost of those that are slow")
	assert.Contains(t, str(entry, attrRootCause), "decode")
	assert.Empty(t, str(named(t, kept[traceID(1)], "decode"), attrPolicy), "only the local root carries the decision")
}

func TestAnApplicationSpanIsNoSpikeWhereTheReceiverMeasuredItsProcess(t *testing.T) {
	h := newHarness(t, nil)
	send := func(trace uint64, extra time.Duration) {
		at, id := h.clock.Sub(epoch), trace<<8
		// The stages do not stand out: the client sent a large body, say.
		h.send(makeTraces(trace,
			kernel("llama-server", request(id|2, id|1, at-extra-100*time.Millisecond, at, map[string]float64{"stage.lock": 0})),
			app("chat", span{id: id | 3, parent: id | 1, name: "POST", kind: server, from: at - extra - 100*time.Millisecond, to: at}),
		))
		h.pass(tickInterval)
	}
	for i := range uint64(200) {
		send(100+i, 0)
	}
	send(1, 500*time.Millisecond)
	h.pass(10 * time.Second)
	assert.Empty(t, h.kept())
}

func TestLoneSpikesAreKeptOnlyIfAskedForAndClustersToTheirBound(t *testing.T) {
	h := newHarness(t, policies(PolicyConfig{Name: "incidents", Type: Spike, Spike: &SpikeConfig{MaxTracesPerCluster: 7}}))
	h.warm(map[string]float64{"stage.lock": 0})
	h.send(h.slow(1, map[string]float64{"stage.lock": 0.3}))
	h.pass(20 * time.Second)
	assert.Empty(t, h.kept(), "a lone spike")
	const incident = 300
	for i := range uint64(incident) {
		h.send(h.slow(10+i, map[string]float64{"stage.lock": 0.3}))
		if i%30 == 0 {
			h.pass(tickInterval)
		}
	}
	h.pass(20 * time.Second)
	kept := h.kept()
	require.GreaterOrEqual(t, len(kept), 2, "a third of the bound is kept whatever comes")
	require.LessOrEqual(t, len(kept), 15, "about the bound")
	id, traces := "", 0
	for _, spans := range kept {
		s := spans[0]
		if id == "" {
			id = str(s, attrClusterID)
		}
		assert.Equal(t, id, str(s, attrClusterID))
		n, _ := s.Attributes().Get(attrClusterTraces)
		traces = max(traces, int(n.Int()))
		count, _ := s.Attributes().Get(attrStandsFor)
		assert.GreaterOrEqual(t, count.Double(), 1.0)
	}
	assert.Len(t, id, 16)
	assert.Greater(t, traces, 5, "how many of the cluster were decided by then")
	assert.Equal(t, map[string]int64{"incidents": int64(incident - len(kept))}, h.sum("traces_limited", "policy"), "what they stand for")
}

func TestProbabilityIsConsistent(t *testing.T) {
	quarter := PolicyConfig{Name: "quarter", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: 25}}
	half := PolicyConfig{Name: "half", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: 50}}
	errs := PolicyConfig{Name: "errors", Type: StatusCode, StatusCode: &StatusCodeConfig{StatusCodes: []string{"ERROR"}}}
	tests := []struct {
		name     string
		policies []PolicyConfig
		state    string
		status   ptrace.StatusCode
		keep     bool
		policy   string
		want     string // tracestate
	}{
		{"randomness above the threshold is kept at its probability", []PolicyConfig{quarter}, "ot=rv:c0000000000000", 0, true, "quarter", "ot=rv:c0000000000000;th:c"},
		{"below is dropped", []PolicyConfig{quarter}, "ot=rv:bfffffffffffff", 0, false, "", ""},
		{"a rule that always keeps says so", []PolicyConfig{errs}, "", ptrace.StatusCodeError, true, "errors", "ot=th:0"},
		{"a stricter threshold that came in stays", []PolicyConfig{errs}, "ot=th:8;rv:c0000000000000", ptrace.StatusCodeError, true, "errors", "ot=th:8;rv:c0000000000000"},
		{"a looser one is tightened", []PolicyConfig{quarter}, "ot=th:8;rv:c0000000000000", 0, true, "quarter", "ot=rv:c0000000000000;th:c"},
		{"of several the least strict counts", []PolicyConfig{quarter, half}, "ot=rv:d0000000000000", 0, true, "half", "ot=rv:d0000000000000;th:8"},
		{"and of equals the first", []PolicyConfig{quarter, {Name: "again", Type: Probabilistic, Probabilistic: quarter.Probabilistic}}, "ot=rv:d0000000000000", 0, true, "quarter", "ot=rv:d0000000000000;th:c"},
		{"others' entries stay", []PolicyConfig{errs}, "vendor=x,ot=foo:1", ptrace.StatusCodeError, true, "errors", "ot=th:0;foo:1,vendor=x"},
		{"what cannot be read stays", []PolicyConfig{errs}, "ot=th:nonsense;;;", ptrace.StatusCodeError, true, "errors", "ot=th:nonsense;;;"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := newHarness(t, policies(tt.policies...))
			h.send(makeTraces(1, app("a", span{id: 2, kind: server, to: time.Millisecond, state: tt.state, status: tt.status})))
			h.pass(10 * time.Second)
			kept := h.kept()[traceID(1)]
			if !tt.keep {
				assert.Empty(t, kept)
				return
			}
			require.Len(t, kept, 1)
			assert.Equal(t, tt.want, kept[0].TraceState().AsRaw())
			assert.Equal(t, tt.policy, str(kept[0], attrPolicy))
		})
	}
}

func TestWithoutExplicitRandomnessTheTraceIDDecides(t *testing.T) {
	h := newHarness(t, policies(PolicyConfig{Name: "tenth", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: 10}}))
	const n = 2000
	want := 0
	for i := range uint64(n) {
		id := traceID(i)
		r := uint64(0)
		for _, b := range id[9:] { // the last 56 bits
			r = r<<8 | uint64(b)
		}
		if float64(r) >= 0.9*(1<<56) {
			want++
		}
		h.send(makeTraces(i, app("a", span{id: 2, kind: server, to: time.Millisecond})))
	}
	h.pass(10 * time.Second)
	assert.Len(t, h.kept(), want)
	assert.InDelta(t, n/10, want, n/50, "the test's ids are random enough")
}

func TestLateSpansFollowTheDecision(t *testing.T) {
	h := newHarness(t, policies(PolicyConfig{Name: "errors", Type: StatusCode, StatusCode: &StatusCodeConfig{StatusCodes: []string{"ERROR"}}}))
	h.send(makeTraces(1, app("a", span{id: 2, kind: server, to: 1, status: ptrace.StatusCodeError})))
	h.send(makeTraces(2, app("a", span{id: 2, kind: server, to: 1})))
	h.pass(10 * time.Second)
	require.Len(t, h.kept(), 1)
	h.send(makeTraces(1, app("a", span{id: 3, parent: 2, name: "late", to: 1})))
	h.send(makeTraces(2, app("a", span{id: 3, parent: 2, name: "late", to: 1, status: ptrace.StatusCodeError})))
	h.pass(time.Second)
	kept := h.kept()
	require.Len(t, kept[traceID(1)], 2)
	late := named(t, kept[traceID(1)], "late")
	assert.Equal(t, "errors", str(late, attrPolicy))
	assert.Equal(t, "ot=th:0", late.TraceState().AsRaw())
	assert.Empty(t, kept[traceID(2)])
	h.pass(time.Second)
	assert.Equal(t, map[string]int64{"sampled": 1, "not_sampled": 1}, h.sum("spans_late", "decision"))
	assert.Equal(t, map[string]int64{"errors": 1, "none": 1}, h.sum("traces_decided", "policy"))
	assert.Zero(t, h.p.buffer.bytes)
}

// afterDrop warms up, lets the application's part of trace 1 be dropped and
// sends services as what comes of it 40 s later.
func afterDrop(t *testing.T, change func(*Config), services func(at time.Duration) []service) *harness {
	t.Helper()
	h := newHarness(t, change)
	h.warm(map[string]float64{"stage.send_buffer": 0.001})
	before := len(h.kept())
	from := h.clock.Sub(epoch)
	h.send(makeTraces(1, app("llm", span{id: 3, parent: 1, name: "POST", kind: server, from: from, to: from + time.Millisecond})))
	h.pass(40 * time.Second) // longer than decision_wait
	require.Empty(t, h.p.buffer.traces)
	if !h.p.cfg.DryRun {
		require.Len(t, h.kept(), before)
	}
	for _, s := range services(from) {
		h.send(makeTraces(1, s))
	}
	h.pass(5 * time.Second)
	require.Empty(t, h.p.buffer.traces, "nothing more to wait for")
	require.Zero(t, h.p.buffer.bytes)
	return h
}

func TestALateKernelRequestWithASpikeIsKeptThoughItsTraceWasDropped(t *testing.T) {
	slow := func(at time.Duration) []service {
		return []service{
			kernel("llm", occurrence(21, 20, "send_buffer", at+time.Millisecond, at+40*time.Second)),
			kernel("llm", request(20, 1, at, at+40*time.Second, map[string]float64{"stage.send_buffer": 39.9})),
			app("llm", span{id: 4, parent: 3, name: "late too", from: at, to: at + time.Millisecond}),
		}
	}
	tests := []struct {
		name   string
		change func(*Config)
		in     func(at time.Duration) []service
		kept   []string // names of spans
		late   map[string]int64
	}{
		{"a spike, with its occurrence; what is not the kernel's follows the decision so far", nil, slow, []string{"send_buffer", kernelRequest}, map[string]int64{"sampled": 2, "not_sampled": 1}},
		{
			"no spike", nil,
			func(at time.Duration) []service {
				return []service{kernel("llm", request(20, 1, at, at+40*time.Second, map[string]float64{"stage.send_buffer": 0.001}))}
			}, nil,
			map[string]int64{"not_sampled": 1},
		},
		{
			"a spike that the policy does not keep",
			policies(PolicyConfig{Name: "incidents", Type: Spike, Spike: &SpikeConfig{}}), slow, nil,
			map[string]int64{"not_sampled": 3},
		},
		{
			"an error: no other policy is asked again",
			policies(PolicyConfig{Name: "errors", Type: StatusCode, StatusCode: &StatusCodeConfig{StatusCodes: []string{"ERROR"}}}),
			func(at time.Duration) []service {
				s := slow(at)[1]
				s.spans[0].status = ptrace.StatusCodeError
				return []service{s}
			}, nil,
			map[string]int64{"not_sampled": 1},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := afterDrop(t, tt.change, tt.in)
			spans := h.kept()[traceID(1)]
			var names []string
			for _, s := range spans {
				names = append(names, s.Name())
			}
			assert.ElementsMatch(t, tt.kept, names)
			assert.Equal(t, tt.late, h.sum("spans_late", "decision"))
			assert.Equal(t, map[string]int64{"none": 201}, h.sum("traces_decided", "policy"), "a trace is counted once")
			assert.Empty(t, h.sum("traces_decided_early", "reason"))
			if len(tt.kept) == 0 {
				return
			}
			r := named(t, spans, kernelRequest)
			assert.Equal(t, "spikes", str(r, attrPolicy))
			assert.Equal(t, "send_buffer", str(r, attrSpikeStage))
			assert.Contains(t, str(r, attrReason), "send_buffer took 39.9s")
			assert.Empty(t, r.TraceState().AsRaw(), "part of the trace was dropped: no claim about probability")
			h.send(makeTraces(1, app("llm", span{id: 5, parent: 3, name: "later", to: time.Millisecond})))
			h.pass(time.Second)
			assert.Equal(t, "spikes", str(named(t, h.kept()[traceID(1)], "later"), attrPolicy), "from then on the trace is a kept one")
		})
	}
	t.Run("a dry run says so", func(t *testing.T) {
		h := afterDrop(t, func(c *Config) { c.DryRun = true }, slow)
		spans := h.kept()[traceID(1)]
		require.Len(t, spans, 4)
		assert.Equal(t, "not_sampled", str(named(t, spans, "POST"), attrDryRun))
		assert.Equal(t, "sampled", str(named(t, spans, kernelRequest), attrDryRun))
	})
}

func TestTheSlowReadersTraceIsKeptWhole(t *testing.T) {
	h := newHarness(t, nil)
	h.warm(map[string]float64{"stage.send_buffer": 0.001})
	from := h.clock.Sub(epoch)
	h.send(makeTraces(1, app("llm", span{id: 3, parent: 1, name: "POST", kind: server, from: from, to: from + time.Millisecond})))
	h.pass(14 * time.Second)
	h.send(makeTraces(1, kernel("llm",
		occurrence(21, 20, "send_buffer", from+time.Millisecond, from+14*time.Second),
		request(20, 1, from, from+14*time.Second, map[string]float64{"stage.send_buffer": 13.9}))))
	h.pass(10 * time.Second)
	spans := h.kept()[traceID(1)]
	require.Len(t, spans, 3)
	assert.Equal(t, spanID(3), named(t, spans, kernelRequest).ParentSpanID())
	assert.Equal(t, "send_buffer", str(named(t, spans, "POST"), attrSpikeStage))
	assert.Equal(t, "ot=th:0", named(t, spans, "POST").TraceState().AsRaw())
	assert.Empty(t, h.sum("spans_late", "decision"))
}

func TestTheDecisionCacheForgetsTheOldest(t *testing.T) {
	c := newCache[int](3)
	for i := range uint64(5) {
		c.put(traceID(i), int(i))
		c.put(traceID(i), int(i)) // again changes nothing
	}
	for i := range uint64(5) {
		v, ok := c.get(traceID(i))
		assert.Equal(t, i >= 2, ok, i)
		if ok {
			assert.Equal(t, int(i), v)
		}
	}
	assert.Len(t, c.of, 3)
	none := newCache[int](0)
	none.put(traceID(1), 1)
	_, ok := none.get(traceID(1))
	assert.False(t, ok)
}

func TestDryRunKeepsAllAndSaysWhatItWouldHaveDone(t *testing.T) {
	h := newHarness(t, func(c *Config) {
		c.DryRun = true
		policies(PolicyConfig{Name: "errors", Type: StatusCode, StatusCode: &StatusCodeConfig{StatusCodes: []string{"ERROR"}}})(c)
	})
	h.send(makeTraces(1, app("a", span{id: 2, kind: server, to: 1, status: ptrace.StatusCodeError, state: "ot=rv:c0000000000000"})))
	h.send(makeTraces(2, app("a", span{id: 2, kind: server, to: 1})))
	h.pass(10 * time.Second)
	h.send(makeTraces(2, app("a", span{id: 3, kind: internal, parent: 2, to: 1}))) // late
	h.pass(time.Second)
	kept := h.kept()
	assert.Equal(t, "sampled", str(kept[traceID(1)][0], attrDryRun))
	assert.Equal(t, "errors", str(kept[traceID(1)][0], attrPolicy))
	assert.Equal(t, "ot=rv:c0000000000000", kept[traceID(1)][0].TraceState().AsRaw(), "no claim about probability: nothing was dropped")
	require.Len(t, kept[traceID(2)], 2)
	assert.Equal(t, "not_sampled", str(kept[traceID(2)][0], attrDryRun))
	assert.Empty(t, str(kept[traceID(2)][0], attrPolicy))
	assert.Equal(t, "not_sampled", str(kept[traceID(2)][1], attrDryRun))
}

// big is a span of about n bytes.
func big(id uint64, n int) span {
	return span{id: id, parent: 1, kind: client, to: time.Millisecond, attrs: map[string]any{"x": strings.Repeat("x", n)}}
}

func TestAFullBufferDecidesTheOldestEarly(t *testing.T) {
	h := newHarness(t, func(c *Config) { c.MaxBufferMiB = 1 })
	for i := range uint64(20) {
		s := big(2, 100_000)
		if i == 0 {
			s.to = 2 * time.Second // a spike by the fallback threshold
		}
		h.send(makeTraces(i, app("a", s)))
		require.LessOrEqual(t, h.p.buffer.bytes, h.p.limit)
	}
	assert.NotContains(t, h.p.buffer.traces, traceID(0))
	assert.Contains(t, h.p.buffer.traces, traceID(19))
	h.pass(2 * time.Second)
	assert.Len(t, h.kept(), 1, "the one evicted still got its decision")
	early := h.sum("traces_decided_early", "reason")
	assert.Len(t, early, 1)
	assert.Equal(t, int64(20-len(h.p.buffer.traces)), early[earlyBufferFull])
}

func TestAGiantTraceIsDecidedAloneAndTheOthersStay(t *testing.T) {
	h := newHarness(t, func(c *Config) { c.MaxBufferMiB = 1 })
	h.send(makeTraces(1, app("a", big(2, 1000))))
	for i := range uint64(30) {
		h.send(makeTraces(2, app("a", big(2+i, 100_000))))
	}
	assert.Contains(t, h.p.buffer.traces, traceID(1))
	assert.NotContains(t, h.p.buffer.traces, traceID(2))
	h.pass(2 * time.Second)
	assert.Equal(t, map[string]int64{earlyTooLarge: 1}, h.sum("traces_decided_early", "reason"))
	assert.Equal(t, map[string]int64{"not_sampled": 27}, h.sum("spans_late", "decision"), "the rest follows the decision")

	h.send(makeTraces(3, app("a", big(2, 2<<20)))) // one span above the whole bound
	assert.Contains(t, h.p.buffer.traces, traceID(1))
	assert.NotContains(t, h.p.buffer.traces, traceID(3))
}

func TestATraceOfManySpansIsPutTogetherWhole(t *testing.T) {
	h := newHarness(t, nil)
	const n = 20_000
	spans := []span{{id: 1, kind: server, to: 5 * time.Second}}
	for i := range uint64(n) {
		spans = append(spans, span{id: 2 + i, parent: 1 + i, kind: internal, to: time.Millisecond}) // one deep chain
	}
	h.send(makeTraces(1, app("a", spans...)))
	h.pass(10 * time.Second)
	assert.Len(t, h.kept()[traceID(1)], n+1)
	assert.Zero(t, h.p.buffer.bytes)
}

func TestWhatIsKeptEarlyByARuleClaimsNoProbability(t *testing.T) {
	half := PolicyConfig{Name: "half", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: 50}}
	h := newHarness(t, func(c *Config) { c.Policies = append(c.Policies, half) })
	h.send(makeTraces(1, app("a", span{id: 2, parent: 1, kind: client, to: 2 * time.Second, state: "ot=th:8;rv:c0000000000000,x=y"})))
	h.send(makeTraces(2, app("a", span{id: 2, parent: 1, kind: client, to: time.Millisecond, state: "ot=rv:c0000000000000"})))
	require.NoError(t, h.p.Shutdown(context.Background()))
	kept := h.kept()
	assert.Equal(t, "ot=rv:c0000000000000,x=y", kept[traceID(1)][0].TraceState().AsRaw(), "a spike in what had come of it")
	assert.Equal(t, "ot=rv:c0000000000000;th:8", kept[traceID(2)][0].TraceState().AsRaw(), "chance does not depend on what comes")
}

func TestShutdownDecidesAndSendsWhatIsThere(t *testing.T) {
	h := newHarness(t, nil)
	h.send(makeTraces(1, app("a", span{id: 2, parent: 1, kind: client, to: 2 * time.Second})))
	h.send(makeTraces(2, app("a", span{id: 2, parent: 1, kind: client, to: time.Millisecond})))
	require.NoError(t, h.p.Shutdown(context.Background()))
	assert.Len(t, h.kept(), 1)
	assert.Equal(t, map[string]int64{earlyShutdown: 2}, h.sum("traces_decided_early", "reason"))
	require.ErrorIs(t, h.p.ConsumeTraces(context.Background(), makeTraces(3, app("a", span{id: 1}))), errNotRunning)
}

func TestSpansWithoutIDsAndDuplicatesAreDroppedAndCounted(t *testing.T) {
	h := newHarness(t, nil)
	td := makeTraces(1, app("a",
		span{id: 2, kind: server, to: 2 * time.Second, name: "whole"}, span{id: 0, name: "no span id"}, span{id: 4, name: "no trace id"},
		span{id: 2, kind: server, to: 2 * time.Second, name: "whole"}, // sent twice
		span{id: 2, kind: client, to: time.Second, name: "same id"},   // another span all the same
	))
	td.ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(2).SetTraceID(pcommon.TraceID{})
	h.send(td)
	h.send(makeTraces(1, app("a", span{id: 2, kind: server, to: 2 * time.Second, name: "whole"}))) // a client's retry
	h.pass(10 * time.Second)
	spans := h.kept()[traceID(1)]
	assert.Len(t, spans, 2)
	assert.Equal(t, map[string]int64{dropNoTraceID: 1, dropNoSpanID: 1, dropDuplicate: 2}, h.sum("spans_dropped", "reason"))
}

func TestDuplicatesAreFoundInALargeTraceToo(t *testing.T) {
	h := newHarness(t, nil)
	for range 2 {
		for i := range uint64(3 * manySpans) {
			h.send(makeTraces(1, app("a", span{id: 2 + i, parent: 1, kind: client, to: time.Millisecond})))
		}
	}
	h.pass(time.Second)
	assert.Equal(t, map[string]int64{dropDuplicate: 3 * manySpans}, h.sum("spans_dropped", "reason"))
}

func TestSkewedClocksDoNoHarm(t *testing.T) {
	year := 365 * 24 * time.Hour
	for name, shift := range map[string]time.Duration{"far in the past": -year, "far in the future": year} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, nil)
			h.warm(map[string]float64{"stage.lock": 0})
			for i := range uint64(6) {
				at := h.clock.Sub(epoch) + shift
				h.send(makeTraces(1+i, kernel("llm", request(2, 1, at-time.Second, at, map[string]float64{"stage.lock": 0.4}))))
			}
			h.pass(10 * time.Second)
			kept := h.kept()
			assert.Len(t, kept, 6)
			assert.NotEmpty(t, str(kept[traceID(1)][0], attrClusterID), "they go by their arrival")
		})
	}
	t.Run("an end before the start is no duration", func(t *testing.T) {
		h := newHarness(t, nil)
		h.send(makeTraces(1, app("a", span{id: 2, kind: server, from: 10 * time.Second, to: time.Second})))
		h.send(makeTraces(2, app("a", span{id: 2, kind: server, from: -year * 60, to: time.Second}))) // before 1970
		h.pass(10 * time.Second)
		own, warming, _ := h.p.baseline.Stats()
		assert.LessOrEqual(t, own+warming, 2)
		assert.Empty(t, h.p.buffer.traces)
	})
}

// failing refuses what it gets until it is told not to.
type failing struct {
	consumertest.TracesSink
	err error
}

func (f *failing) ConsumeTraces(ctx context.Context, td ptrace.Traces) error {
	if f.err != nil {
		return f.err
	}
	return f.TracesSink.ConsumeTraces(ctx, td)
}

func TestErrorsDownstreamAreCountedAndDoNotStopTheRest(t *testing.T) {
	next := &failing{err: errors.New("no room")}
	h := newHarnessTo(t, nil, next)
	h.send(makeTraces(1, app("a", span{id: 2, kind: server, to: 2 * time.Second}, span{id: 3, parent: 2, to: time.Second})))
	h.pass(9 * time.Second)
	next.err = nil
	h.send(makeTraces(2, app("a", span{id: 2, kind: server, to: 2 * time.Second})))
	h.pass(10 * time.Second)
	assert.Equal(t, 1, next.SpanCount())
	assert.Equal(t, map[string]int64{dropDownstream: 2}, h.sum("spans_dropped", "reason"))
	assert.Equal(t, map[string]int64{"": 1}, h.sum("downstream_errors", "reason"))
	assert.Zero(t, h.p.buffer.bytes)
	assert.Zero(t, h.p.outboxBytes)
}

// A buffer that fills up with traces to be kept does not have all others decided
// on what is there of them.
func TestAFullBufferDecidesNoMoreThanItHasTooMuch(t *testing.T) {
	h := newHarness(t, func(c *Config) {
		c.MaxBufferMiB = 1
		c.DryRun = true // all are kept
	})
	h.blocks = true
	sent := 0
	for len(h.p.buffer.traces) == sent {
		h.send(makeTraces(uint64(sent), app("a", big(2, 1000))))
		sent++
	}
	undecided := len(h.p.buffer.traces)
	assert.Greater(t, undecided, sent*9/10, "of %d", sent)
	for range 10 {
		h.send(makeTraces(uint64(sent), app("a", big(2, 1000))))
		sent++
	}
	assert.Greater(t, len(h.p.buffer.traces), undecided-20, "each makes room for itself")
	assert.LessOrEqual(t, h.p.buffer.bytes, h.p.limit)
}

// stuck blocks until it is let go, or its context ends.
type stuck struct {
	consumertest.TracesSink
	entered chan struct{}
	letGo   chan struct{}
}

func (s *stuck) ConsumeTraces(ctx context.Context, td ptrace.Traces) error {
	s.entered <- struct{}{}
	select {
	case <-s.letGo:
		return s.TracesSink.ConsumeTraces(ctx, td)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func TestWhileTheNextComponentIsStuckSpansAreTakenUntilTheBufferIsFull(t *testing.T) {
	next := &stuck{entered: make(chan struct{}, 100), letGo: make(chan struct{})}
	h := newHarnessTo(t, func(c *Config) { c.MaxBufferMiB = 1; c.Policies = []PolicyConfig{keepErrs} }, next)
	h.send(makeTraces(1, app("a", span{id: 2, kind: server, to: 1, status: ptrace.StatusCodeError})))
	h.clock = h.clock.Add(20 * time.Second)
	ticked := make(chan struct{})
	go func() { h.p.tick(); close(ticked) }()
	<-next.entered
	refused := 0
	for i := range uint64(20) {
		s := big(2, 100_000)
		s.status = ptrace.StatusCodeError // all are kept
		err := h.p.ConsumeTraces(context.Background(), makeTraces(10+i, app("a", s)))
		if err != nil {
			require.ErrorIs(t, err, errBufferFull)
			assert.False(t, consumererror.IsPermanent(err), "the sender may try again")
			refused++
		}
	}
	assert.Positive(t, refused)
	assert.Less(t, refused, 15)
	<-ticked // nothing waits for the next component
	close(next.letGo)
	h.pass(time.Minute)
	assert.Equal(t, 21-refused, next.SpanCount(), "nothing that was taken is lost")
	assert.Equal(t, map[string]int64{dropRefused: int64(refused)}, h.sum("spans_dropped", "reason"))
}

func TestShutdownEndsAtItsDeadlineWhenTheNextComponentIsStuck(t *testing.T) {
	next := &stuck{entered: make(chan struct{}, 100), letGo: make(chan struct{})}
	p, err := newProcessor(processortest.NewNopSettings(metadata.Type), defaultConfig(), next)
	require.NoError(t, err)
	require.NoError(t, p.Start(t.Context(), componenttest.NewNopHost()))
	require.NoError(t, p.ConsumeTraces(t.Context(), makeTraces(1, app("a", span{id: 2, kind: server, to: 2 * time.Second}))))
	ctx, cancel := context.WithCancel(context.Background())
	go func() { <-next.entered; cancel() }()
	require.ErrorIs(t, p.Shutdown(ctx), context.Canceled)
	require.NoError(t, p.Shutdown(ctx), "again does nothing")
}

// The bound is honest: what is counted is about what the heap holds.
func TestBufferUsageIsAboutWhatTheHeapHolds(t *testing.T) {
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	for _, perTrace := range []int{1, 8, 200} {
		t.Run(fmt.Sprint(perTrace, " spans a trace"), func(t *testing.T) {
			h := newHarness(t, nil)
			before := heap()
			for i := range uint64(40_000 / perTrace) {
				for k := range perTrace {
					h.send(makeTraces(1+i, app("a", span{
						id: uint64(2 + k), parent: 1, kind: client, to: time.Millisecond, name: "call",
						attrs: map[string]any{"http.request.method": "POST", "url.path": "/v1/chat/completions", "server.address": "inference.svc"},
					})))
				}
			}
			held := heap() - before
			runtime.KeepAlive(h)
			assert.InEpsilon(t, held, h.p.buffer.bytes, 0.1)
			t.Logf("heap %d, counted %d, a trace %d", held, h.p.buffer.bytes, held/int64(40_000/perTrace))
		})
	}
}

func TestANewOperationIsJudgedByItsServiceInDelaysOnly(t *testing.T) {
	h := newHarness(t, nil)
	h.warm(map[string]float64{"stage.lock": 0.001, "stage.wait": 0.01})
	send := func(trace uint64, stages map[string]float64) {
		td := h.slow(trace, stages)
		td.ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(0).Attributes().PutStr("gen_ai.operation.name", "embeddings")
		h.send(td)
	}
	send(1, map[string]float64{"stage.lock": 0.3, "stage.wait": 0.01}) // a delay, below the fallback threshold
	send(2, map[string]float64{"stage.lock": 0.001, "stage.wait": 30}) // waits longer by its nature
	h.pass(10 * time.Second)
	kept := h.kept()
	require.Len(t, kept, 1)
	assert.Equal(t, "parent", str(kept[traceID(1)][0], attrBaselineState))
}

func TestTheFallbackIsNoBaseline(t *testing.T) {
	h := newHarness(t, nil)
	h.send(h.slow(1, map[string]float64{"stage.lock": 1.5}))
	h.pass(10 * time.Second)
	s := h.kept()[traceID(1)][0]
	assert.Equal(t, "fallback", str(s, attrBaselineState))
	assert.Contains(t, str(s, attrReason), "lock took 1.5s, above the fallback threshold of 1s")
	_, ok := s.Attributes().Get(attrBaseline)
	assert.False(t, ok, "unknown is not zero")
}

func TestTheRootCauseNamesTheThreadThatWasWaitedFor(t *testing.T) {
	h := newHarness(t, nil)
	h.warm(map[string]float64{"stage.lock": 0})
	at := h.clock.Sub(epoch)
	stall := occurrence(0x103, 0x102, "lock", at-490*time.Millisecond, at-10*time.Millisecond)
	stall.attrs[attrWaker], stall.attrs[attrPID], stall.attrs[attrTID] = true, 70, 71
	h.send(makeTraces(1, kernel("llm", stall,
		request(0x102, 0x101, at-500*time.Millisecond, at, map[string]float64{"stage.lock": 0.48, "waker.lock": 0.48}))))
	h.pass(20 * time.Second)
	assert.Contains(t, str(named(t, h.kept()[traceID(1)], kernelRequest), attrRootCause), "thread 71 of process 70")
}

// A step and decisions go on while spans come in, and each trace gets its due.
func TestSpansAreTakenWhileAStepGoesOn(t *testing.T) {
	h := newHarness(t, nil)
	h.warm(map[string]float64{"stage.lock": 0.001})
	for i := range uint64(6) {
		h.send(h.slow(1+i, map[string]float64{"stage.lock": 0.3}))
	}
	h.clock = h.clock.Add(3 * time.Second)
	h.p.mu.Lock()
	n := h.p.clusters.take()
	h.p.mu.Unlock()
	// Between its beginning and its end a step holds no lock.
	h.send(h.slow(7, map[string]float64{"stage.lock": 0.3}))
	res := h.p.clusters.step(n, h.p.clock())
	h.send(h.slow(8, map[string]float64{"stage.lock": 0.3}))
	assert.Nil(t, h.p.buffer.traces[traceID(1)].spikes[0].point.cluster, "not known yet")
	h.p.mu.Lock()
	res.publish()
	h.p.mu.Unlock()
	assert.NotNil(t, h.p.buffer.traces[traceID(1)].spikes[0].point.cluster)
	h.pass(10 * time.Second)
	assert.Len(t, h.kept(), 8)
	assert.Equal(t, str(h.kept()[traceID(1)][0], attrClusterID), str(h.kept()[traceID(6)][0], attrClusterID))
}

func TestDecisionsUnderPressureAreDeterministic(t *testing.T) {
	run := func() [][]byte {
		h := newHarness(t, func(c *Config) {
			c.MaxBufferMiB = 1
			limited := keepErrs
			limited.MaxTracesPerSecond = 5
			c.Policies = append(c.Policies, limited, PolicyConfig{Name: "base", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: 10}})
			c.Policies[0].Spike.MaxTracesPerCluster = 20
		})
		tr := &traffic{h: h, rng: rand.New(rand.NewPCG(1, 2)), want: map[uint64]string{}}
		for i := range 1500 {
			switch {
			case i > 400 && i%5 == 0:
				tr.request([]string{"lock", "page_fault"}[i/5%2], 300*time.Millisecond)
			default:
				tr.request("", 0)
			}
			if i%7 == 0 {
				at := h.clock.Sub(epoch)
				h.send(makeTraces(uint64(1e6)+uint64(i), app("web", span{id: 1, parent: 7, from: at, to: at + 1, status: ptrace.StatusCodeError, attrs: map[string]any{"x": strings.Repeat("x", 3000)}})))
			}
			h.pass(time.Duration(5+tr.rng.IntN(20)) * time.Millisecond)
		}
		h.pass(time.Minute)
		require.NotEmpty(t, h.sum("traces_decided_early", "reason"), "the buffer was full at times")
		var out [][]byte
		for _, td := range h.sink.AllTraces() {
			b, err := (&ptrace.ProtoMarshaler{}).MarshalTraces(td)
			require.NoError(t, err)
			out = append(out, b)
		}
		return out
	}
	first := run()
	require.Greater(t, len(first), 100)
	assert.Equal(t, first, run())
}

// Meant for the race detector; whatever the order, each trace is decided once.
func TestIngestDecisionsAndStepsAtTheSameTime(t *testing.T) {
	h := newHarness(t, func(c *Config) { c.MaxBufferMiB = 1 })
	h.warm(map[string]float64{"stage.lock": 0.001})
	start := h.clock
	var now atomic.Int64
	now.Store(start.UnixNano())
	h.p.mu.Lock()
	h.p.now = func() time.Time { return time.Unix(0, now.Load()) }
	h.p.mu.Unlock()
	var senders sync.WaitGroup
	const each = 500
	for s := range uint64(3) {
		senders.Go(func() {
			for i := range uint64(each) {
				at := time.Unix(0, now.Load()).Sub(epoch)
				n := 1 + s*each + i
				td := makeTraces(n, kernel("llm", request(n<<8|2, n<<8|1, at-time.Second, at, map[string]float64{"stage.lock": 0.3})), app("llm", big(n<<8|3, 2000)))
				for {
					again := ptrace.NewTraces()
					td.CopyTo(again)
					err := h.p.ConsumeTraces(context.Background(), again)
					if err == nil {
						break
					}
					assert.ErrorIs(t, err, errBufferFull) // by kept traces: as a sender would, try again
					runtime.Gosched()
				}
			}
		})
	}
	sent, ticked := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ticked)
		for {
			select {
			case <-sent:
				return
			default:
				now.Add(tickInterval.Nanoseconds())
				h.p.tick()
			}
		}
	}()
	senders.Wait()
	close(sent)
	<-ticked
	for range 100 {
		now.Add(tickInterval.Nanoseconds())
		h.p.tick()
	}
	h.p.drain()
	h.p.mu.Lock()
	assert.Empty(t, h.p.buffer.traces)
	assert.Zero(t, h.p.buffer.bytes)
	h.p.mu.Unlock()
	total := int64(0)
	for _, n := range h.sum("traces_decided", "policy") {
		total += n
	}
	assert.Equal(t, int64(200+3*each), total)
}
