package spikesamplingprocessor

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/sampling"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

var (
	keepAll   = PolicyConfig{Name: "all", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: 100}}
	keepErrs  = PolicyConfig{Name: "errors", Type: StatusCode, StatusCode: &StatusCodeConfig{StatusCodes: []string{"ERROR"}}}
	mustKeep  = PolicyConfig{Name: "asked", Type: MustKeep}
	noHealth  = PolicyConfig{Name: "health", Type: Drop, Drop: &OTTLConfig{Span: []string{`attributes["url.path"] == "/health"`}}}
	slowFirst = PolicyConfig{Name: "ttft", Type: OTTLCondition, OTTLCondition: &OTTLConfig{
		Span:      []string{`span.attributes["ttft"] != nil and span.attributes["ttft"] > 2.0`},
		SpanEvent: []string{`name == "exception"`},
	}}
)

func TestEachPolicyKeepsWhatItIsAbout(t *testing.T) {
	plain := span{id: 2, kind: server, to: time.Millisecond}
	with := func(attrs map[string]any) span { s := plain; s.attrs = attrs; return s }
	failed := with(map[string]any{"url.path": "/health"})
	failed.status = ptrace.StatusCodeError
	tests := []struct {
		name     string
		policies []PolicyConfig
		span     span
		change   func(ptrace.Traces)
		policy   string // that decides; none if empty
		keep     bool
	}{
		{"a condition holds", []PolicyConfig{slowFirst}, with(map[string]any{"ttft": 2.5}), nil, "ttft", true},
		{"a condition does not hold", []PolicyConfig{slowFirst}, with(map[string]any{"ttft": 1.5}), nil, "", false},
		{"a condition on something that is not there", []PolicyConfig{slowFirst}, plain, nil, "", false},
		{"a condition on an event", []PolicyConfig{slowFirst}, plain, func(td ptrace.Traces) {
			td.ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(0).Events().AppendEmpty().SetName("exception")
		}, "ttft", true},
		{"another event", []PolicyConfig{slowFirst}, plain, func(td ptrace.Traces) {
			td.ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(0).Events().AppendEmpty().SetName("gc")
		}, "", false},
		{"a condition on resource and scope", []PolicyConfig{{Name: "app", Type: OTTLCondition, OTTLCondition: &OTTLConfig{
			Span: []string{`resource.attributes["service.name"] == "a" and scope.name == "app" and IsRootSpan()`},
		}}}, plain, nil, "app", true},
		{"must_keep on the span", []PolicyConfig{mustKeep}, with(map[string]any{"must_keep": true}), nil, "asked", true},
		{"must_keep as a word", []PolicyConfig{mustKeep}, with(map[string]any{"must_keep": "true"}), nil, "asked", true},
		{"must_keep as a number", []PolicyConfig{mustKeep}, with(map[string]any{"must_keep": int64(1)}), nil, "asked", true},
		{"must_keep says no", []PolicyConfig{mustKeep}, with(map[string]any{"must_keep": "false"}), nil, "", false},
		{"must_keep on the resource", []PolicyConfig{mustKeep}, plain, func(td ptrace.Traces) {
			td.ResourceSpans().At(0).Resource().Attributes().PutBool("must_keep", true)
		}, "asked", true},
		{"an attribute of another name with a value", []PolicyConfig{{Name: "vip", Type: MustKeep, MustKeep: &MustKeepConfig{Attribute: "tier", Values: []string{"gold"}}}}, with(map[string]any{"tier": "gold"}), nil, "vip", true},
		{"and with another value", []PolicyConfig{{Name: "vip", Type: MustKeep, MustKeep: &MustKeepConfig{Attribute: "tier", Values: []string{"gold"}}}}, with(map[string]any{"tier": "true"}), nil, "", false},
		{"drop is stronger than the others", []PolicyConfig{keepErrs, keepAll, noHealth}, failed, nil, "health", false},
		{"drop leaves others alone", []PolicyConfig{keepAll, noHealth}, with(map[string]any{"url.path": "/v1"}), nil, "all", true},
		{"must_keep is stronger than drop", []PolicyConfig{keepAll, noHealth, mustKeep}, with(map[string]any{"url.path": "/health", "must_keep": true}), nil, "asked", true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := newHarness(t, policies(tt.policies...))
			td := makeTraces(1, app("a", tt.span))
			if tt.change != nil {
				tt.change(td)
			}
			h.send(td)
			h.pass(10 * time.Second)
			assert.Len(t, h.kept(), map[bool]int{true: 1}[tt.keep])
			want := tt.policy
			if want == "" {
				want = noPolicy
			}
			assert.Equal(t, map[string]int64{want: 1}, h.sum("traces_decided", "policy"))
			assert.Empty(t, h.sum("condition_errors", "policy"))
		})
	}
}

func TestAConditionThatCannotBeEvaluatedDoesNotHoldAndIsCounted(t *testing.T) {
	h := newHarness(t, policies(PolicyConfig{Name: "odd", Type: OTTLCondition, OTTLCondition: &OTTLConfig{Span: []string{`Double(attributes["n"]) > 1.0 and Substring(name, 5, 3) == "x"`}}}))
	h.send(makeTraces(1, app("a", span{id: 2, name: "ab", kind: server, to: 1, attrs: map[string]any{"n": "2"}})))
	h.pass(10 * time.Second)
	assert.Empty(t, h.kept())
	assert.Equal(t, map[string]int64{"odd": 1}, h.sum("condition_errors", "policy"))
}

func TestWhatADropPolicyDroppedIsNotOpenedAgain(t *testing.T) {
	h := newHarness(t, func(c *Config) { c.Policies = append(c.Policies, noHealth) })
	h.warm(map[string]float64{"stage.lock": 0.001})
	h.send(makeTraces(1, app("other", span{id: 3, parent: 1, kind: server, to: 1, attrs: map[string]any{"url.path": "/health"}})))
	h.pass(10 * time.Second)
	h.send(makeTraces(1, kernel("llm", request(20, 1, 0, time.Second, map[string]float64{"stage.lock": 0.9}))))
	h.pass(10 * time.Second)
	assert.Empty(t, h.kept())
	assert.Equal(t, map[string]int64{"not_sampled": 1}, h.sum("spans_late", "decision"))
}

func TestARateIsKeptAndWhatPassesSaysHowManyItStandsFor(t *testing.T) {
	limited := keepErrs
	limited.MaxTracesPerSecond = 20
	h := newHarness(t, policies(limited))
	rng := rand.New(rand.NewPCG(5, 5))
	const seconds, perSecond = 60, 400
	n := uint64(0)
	for range seconds {
		for range perSecond {
			n++
			h.send(makeTraces(n, app("a", span{id: 2, kind: server, to: 1, status: ptrace.StatusCodeError, state: fmt.Sprintf("ot=rv:%014x", rng.Uint64N(1<<56))})))
		}
		h.pass(time.Second)
	}
	h.pass(10 * time.Second)
	kept := h.kept()
	assert.LessOrEqual(t, len(kept), 20*seconds+80, "the rate, and 1 + ln 20 seconds of it for the sudden rise")
	assert.Greater(t, len(kept), 20*seconds/2, "and it is used")
	sum, variance := 0.0, 0.0
	for _, spans := range kept {
		w := adjusted(t, spans[0])
		sum += w
		variance += w * (w - 1)
	}
	assert.InDelta(t, n, sum, 4*math.Sqrt(variance))
	assert.Equal(t, map[string]int64{"errors": int64(n) - int64(len(kept))}, h.sum("traces_limited", "policy"))
}

// adjusted returns how many spans the tracestate says that it stands for.
func adjusted(tb testing.TB, s ptrace.Span) float64 {
	tb.Helper()
	w, err := sampling.NewW3CTraceState(s.TraceState().AsRaw())
	require.NoError(tb, err)
	th, ok := w.OTelValue().TValueThreshold()
	require.True(tb, ok, "no threshold in %q", s.TraceState().AsRaw())
	return th.AdjustedCount()
}

// What is kept by several policies at once, each with its own probability, of
// traffic some of which was sampled before, and of an incident and a class of
// errors that are thinned out, adds up to what there was.
func TestAdjustedCountsAddUpToTheTruth(t *testing.T) {
	limited := keepErrs
	limited.MaxTracesPerSecond = 5
	base := PolicyConfig{Name: "base", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: 3}}
	chat := PolicyConfig{Name: "chat", Type: OTTLCondition, OTTLCondition: &OTTLConfig{Span: []string{`name == "chat"`}}, MaxTracesPerSecond: 15}
	type class struct {
		truth, sum, variance float64
		kept                 int
	}
	classes := map[string]*class{"plain": {}, "error": {}, "chat": {}, "sampled": {}, "incident": {}}
	for seed := range uint64(8) {
		h := newHarness(t, policies(PolicyConfig{Name: "spikes", Type: Spike, Spike: &SpikeConfig{KeepLone: true, MaxTracesPerCluster: 40}}, limited, chat, base))
		h.warm(map[string]float64{"stage.lock": 0.001})
		h.sink.Reset()
		rng := rand.New(rand.NewPCG(seed, 1))
		of := map[uint64]string{}
		n := uint64(0)
		send := func(name string, s span) {
			n++
			of[n] = name
			r := rng.Uint64N(1 << 56)
			s.state = fmt.Sprintf("ot=rv:%014x", r)
			if name == "sampled" { // upstream: half of them
				classes[name].truth++
				if r < 1<<55 {
					return
				}
				s.state += ";th:8"
			} else {
				classes[name].truth++
			}
			svc := app("web", s)
			if name == "incident" {
				svc = kernel("llm", s)
			}
			h.send(makeTraces(n, svc))
		}
		for tick := range 100 {
			now := h.clock.Sub(epoch)
			plain := span{id: 2, kind: server, from: now, to: now + time.Millisecond}
			bad, c := plain, plain
			bad.status = ptrace.StatusCodeError
			c.name = "chat"
			for range 5 {
				send("plain", plain)
				send("error", bad)
				send("chat", c)
				send("sampled", plain)
			}
			if tick >= 30 && tick < 40 {
				for range 30 {
					send("incident", request(2, 1, now-time.Second, now, map[string]float64{"stage.lock": 0.4}))
				}
			}
			h.pass(tickInterval)
		}
		h.pass(40 * time.Second)
		for id, name := range of {
			spans := h.kept()[traceID(id)]
			if len(spans) == 0 {
				continue
			}
			w := adjusted(t, spans[0])
			cl := classes[name]
			cl.kept++
			cl.sum += w
			cl.variance += w * (w - 1)
		}
	}
	for name, c := range classes {
		sigma := math.Sqrt(c.variance)
		t.Logf("%s: %v traces, %d kept, adjusted %.0f ± %.0f", name, c.truth, c.kept, c.sum, sigma)
		assert.Less(t, float64(c.kept), c.truth/2, name)
		assert.InDelta(t, c.truth, c.sum, 4*sigma, name)
		assert.Less(t, sigma, c.truth/3, "%s: the test could not fail", name)
	}
}
