package spikepolicyextension

import (
	"context"
	"encoding/binary"
	"sync/atomic"
	"testing"
	"time"

	"github.com/open-telemetry/opentelemetry-collector-contrib/processor/tailsamplingprocessor"
	"github.com/open-telemetry/opentelemetry-collector-contrib/processor/tailsamplingprocessor/pkg/samplingpolicy"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/extension/extensiontest"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/processor"
	"go.opentelemetry.io/collector/processor/processortest"

	"github.com/ebpfllm/ebpfllm/processor/spikesamplingprocessor"
)

type host struct {
	extensions map[component.ID]component.Component
}

func (h host) GetExtensions() map[component.ID]component.Component { return h.extensions }

func newHost(t *testing.T) host {
	t.Helper()
	ext, err := NewFactory().Create(t.Context(), extensiontest.NewNopSettings(Type), NewFactory().CreateDefaultConfig())
	require.NoError(t, err)
	require.NoError(t, ext.Start(t.Context(), componenttest.NewNopHost()))
	t.Cleanup(func() { require.NoError(t, ext.Shutdown(context.Background())) })
	return host{map[component.ID]component.Component{component.NewID(Type): ext}}
}

// start starts a processor with the configuration given as YAML would give it.
func start(t *testing.T, f processor.Factory, cfg map[string]any, on component.Host, next consumer.Traces) processor.Traces {
	t.Helper()
	c := f.CreateDefaultConfig()
	require.NoError(t, confmap.NewFromStringMap(cfg).Unmarshal(c))
	p, err := f.CreateTraces(t.Context(), processortest.NewNopSettings(f.Type()), c, next)
	require.NoError(t, err)
	require.NoError(t, p.Start(t.Context(), on))
	return p
}

// request is a trace of one SERVER span that took so long.
func request(n uint64, took time.Duration) ptrace.Traces {
	td := ptrace.NewTraces()
	rs := td.ResourceSpans().AppendEmpty()
	rs.Resource().Attributes().PutStr("service.name", "web")
	s := rs.ScopeSpans().AppendEmpty().Spans().AppendEmpty()
	var id pcommon.TraceID
	binary.BigEndian.PutUint64(id[:8], n+1)
	binary.BigEndian.PutUint64(id[8:], n*0x9e3779b97f4a7c15)
	s.SetTraceID(id)
	s.SetSpanID(pcommon.SpanID{1})
	s.SetName("POST /chat")
	s.SetKind(ptrace.SpanKindServer)
	now := time.Now()
	s.SetStartTimestamp(pcommon.NewTimestampFromTime(now.Add(-took)))
	s.SetEndTimestamp(pcommon.NewTimestampFromTime(now))
	return td
}

func attribute(s ptrace.Span, key string) string {
	v, _ := s.Attributes().Get(key)
	return v.AsString()
}

func spans(sink *consumertest.TracesSink) (all []ptrace.Span) {
	for _, td := range sink.AllTraces() {
		for _, rs := range td.ResourceSpans().All() {
			for _, ss := range rs.ScopeSpans().All() {
				for _, s := range ss.Spans().All() {
					all = append(all, s)
				}
			}
		}
	}
	return all
}

// counting counts the spans that it passes on.
type counting struct {
	consumer.Traces
	spans atomic.Int64
}

func (c *counting) ConsumeTraces(ctx context.Context, td ptrace.Traces) error {
	n := td.SpanCount()
	err := c.Traces.ConsumeTraces(ctx, td)
	c.spans.Add(int64(n))
	return err
}

const usual = 200

// Contrib's tail_sampling keeps, by its policy spike_policy, the requests that
// are slow, and nothing else.
func TestTailSamplingKeepsSpikesByThePolicy(t *testing.T) {
	sink := new(consumertest.TracesSink)
	p := start(t, tailsamplingprocessor.NewFactory(), map[string]any{
		"decision_wait": "1s",
		"policies": []any{map[string]any{
			"name": "spikes", "type": "spike_policy",
			"spike_policy": map[string]any{"max_traces_per_cluster": 50, "baseline": map[string]any{"min_samples": 50}},
		}},
	}, newHost(t), sink)
	for i := range uint64(usual) {
		require.NoError(t, p.ConsumeTraces(t.Context(), request(i, 20*time.Millisecond)))
	}
	// tail_sampling decides what came within a second in any order. Once one of a
	// second is out, by the fallback threshold, what comes is decided after the rest.
	require.NoError(t, p.ConsumeTraces(t.Context(), request(usual+1, 20*time.Second)))
	require.Eventually(t, func() bool { return sink.SpanCount() > 0 }, 20*time.Second, 10*time.Millisecond)
	sink.Reset()
	require.NoError(t, p.ConsumeTraces(t.Context(), request(usual, 400*time.Millisecond)))
	require.Eventually(t, func() bool { return sink.SpanCount() > 0 }, 20*time.Second, 10*time.Millisecond)
	require.NoError(t, p.Shutdown(context.Background()))
	kept := spans(sink)
	require.Len(t, kept, 1)
	assert.Equal(t, "span", attribute(kept[0], "spike.stage"))
	assert.Equal(t, "own", attribute(kept[0], "spike.baseline.state"))
	assert.Equal(t, "spikes", attribute(kept[0], "spike.policy"))
	assert.Contains(t, attribute(kept[0], "spike.reason"), "took 400ms")
}

func TestAPolicyThatIsConfiguredWronglyIsRefused(t *testing.T) {
	ext := newHost(t).extensions[component.NewID(Type)].(samplingpolicy.Extension)
	for want, cfg := range map[string]map[string]any{
		"keep_lone":                        {"keep_lone": false},
		"baseline::quantile is 99":         {"baseline": map[string]any{"quantile": 99}},
		"max_traces_per_cluster is -1":     {"max_traces_per_cluster": -1},
		`policy "x"`:                       {"clustering": "none"},
		"clustering::min_samples is 1: se": {"clustering": map[string]any{"min_samples": 1}},
	} {
		_, err := ext.NewEvaluator("x", cfg)
		require.ErrorContains(t, err, want)
	}
	_, err := ext.NewEvaluator("x", nil)
	require.NoError(t, err, "all has defaults")
}

// Before tail_sampling: in a dry run spike_sampling says on each trace what it
// would do, and a policy of tail_sampling goes by that.
func TestBeforeTailSamplingADryRunSaysWhatIsASpike(t *testing.T) {
	sink := new(consumertest.TracesSink)
	tail := start(t, tailsamplingprocessor.NewFactory(), map[string]any{
		"decision_wait": "1s",
		"policies": []any{map[string]any{
			"name": "spikes", "type": "string_attribute",
			"string_attribute": map[string]any{"key": "spike.dry_run.decision", "values": []any{"sampled"}},
		}},
	}, componenttest.NewNopHost(), sink)
	p := start(t, spikesamplingprocessor.NewFactory(), map[string]any{
		"dry_run": true, "decision_wait": "1s", "decision_wait_after_root_received": "1s", "max_trace_duration": "1m",
	}, componenttest.NewNopHost(), tail)
	for i := range uint64(usual) {
		require.NoError(t, p.ConsumeTraces(t.Context(), request(i, 20*time.Millisecond)))
	}
	require.NoError(t, p.ConsumeTraces(t.Context(), request(usual, 400*time.Millisecond)))
	require.Eventually(t, func() bool { return sink.SpanCount() > 0 }, 20*time.Second, 10*time.Millisecond)
	require.NoError(t, p.Shutdown(context.Background()))
	require.NoError(t, tail.Shutdown(context.Background()))
	require.Len(t, spans(sink), 1)
	assert.Contains(t, attribute(spans(sink)[0], "spike.reason"), "took 400ms")
}

// Behind tail_sampling: what goes by anything but latency may be dropped before.
func TestBehindTailSamplingThatDropsByKind(t *testing.T) {
	sink := new(consumertest.TracesSink)
	p := start(t, spikesamplingprocessor.NewFactory(), map[string]any{
		"decision_wait": "1s", "decision_wait_after_root_received": "1s", "max_trace_duration": "1m",
	}, componenttest.NewNopHost(), sink)
	passed := counting{Traces: p}
	tail := start(t, tailsamplingprocessor.NewFactory(), map[string]any{
		"decision_wait": "1s",
		"policies": []any{
			map[string]any{"name": "health", "type": "drop", "drop": map[string]any{"drop_sub_policy": []any{map[string]any{
				"name": "health", "type": "string_attribute",
				"string_attribute": map[string]any{"key": "url.path", "values": []any{"/health"}},
			}}}},
			map[string]any{"name": "all", "type": "always_sample"},
		},
	}, componenttest.NewNopHost(), &passed)
	for i := range uint64(usual) {
		require.NoError(t, tail.ConsumeTraces(t.Context(), request(i, 20*time.Millisecond)))
	}
	require.Eventually(t, func() bool { return passed.spans.Load() == usual }, 20*time.Second, 10*time.Millisecond)
	health := request(usual+1, 2*time.Second)
	health.ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(0).Attributes().PutStr("url.path", "/health")
	require.NoError(t, tail.ConsumeTraces(t.Context(), health))
	require.NoError(t, tail.ConsumeTraces(t.Context(), request(usual, 400*time.Millisecond)))
	require.Eventually(t, func() bool { return sink.SpanCount() > 0 }, 20*time.Second, 10*time.Millisecond)
	require.NoError(t, tail.Shutdown(context.Background()))
	require.NoError(t, p.Shutdown(context.Background()))
	require.Len(t, spans(sink), 1)
	assert.Contains(t, attribute(spans(sink)[0], "spike.reason"), "took 400ms")
}
