//go:build backends

package backendtest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"

	"github.com/ebpfllm/ebpfllm/internal/distribution"
)

// Two samplers behind one agent, as in examples/tail-sampling, become three in
// the middle of a stream of traces, and later the first of them goes. Each span
// for which a trace is kept is at the back end once, also those that the sampler
// which goes had not decided on. Only of traces that were on their way while the
// samplers changed may a part that has no error be dropped, by the sampler that
// saw nothing else of it.
func TestScalingTheSecondTierLosesNoDecidedTrace(t *testing.T) {
	require.Zero(t, os.Geteuid(), "the agent reads kernel events; run this test as root")
	kept := startBackend(t)
	a, b, c := startSampler(t, kept.otlp), startSampler(t, kept.otlp), startSampler(t, kept.otlp)
	agent := startAgent(t, a, b)
	stream := agent.stream(t)

	took := func(s tier) bool { return s.metric(t, "receiver_accepted_spans") > 100 }
	await(t, "both samplers have their share", func() bool { return took(a) && took(b) })
	assert.Zero(t, c.metric(t, "receiver_accepted_spans"), "nobody knows the third sampler yet")

	up := agent.scale(t, a, b, c)
	await(t, "the new sampler has its share", func() bool { return took(c) })

	// Spans without a local root wait for one, undecided, while their sampler goes.
	held := agent.hold(t, 60)
	await(t, "the sampler that goes holds undecided traces", func() bool {
		return a.metric(t, "processor_spike_sampling_traces_buffered") > 0
	})
	down := agent.scale(t, b, c)
	before := a.metric(t, "receiver_accepted_spans")
	require.Positive(t, a.metric(t, "processor_spike_sampling_traces_buffered"), "it decided before it went")
	require.NoError(t, a.Stop())

	from := b.metric(t, "receiver_accepted_spans")
	await(t, "the stream goes on without it", func() bool { return b.metric(t, "receiver_accepted_spans") > from+100 })
	sent := stream.end()
	await(t, "the samplers that stay have decided", func() bool {
		return b.metric(t, "processor_spike_sampling_traces_buffered")+c.metric(t, "processor_spike_sampling_traces_buffered") == 0 &&
			before+b.metric(t, "receiver_accepted_spans")+c.metric(t, "receiver_accepted_spans") >= float64(sent.spans+held)
	})
	arrived := before + b.metric(t, "receiver_accepted_spans") + c.metric(t, "receiver_accepted_spans")
	assert.LessOrEqual(t, arrived, float64(sent.spans+held+sent.again), "spans at the samplers; %d were sent again", sent.again)
	for _, s := range []tier{b, c} {
		assert.Zero(t, s.metric(t, "processor_spike_sampling_traces_decided_early"))
		assert.Zero(t, s.metric(t, "processor_spike_sampling_downstream_errors"))
	}

	var found map[pcommon.TraceID]map[string]int
	complete := func() bool {
		found = kept.spans(t)
		for _, tr := range sent.traces {
			if tr.failed && !tr.late() && found[tr.id]["engine"] == 0 {
				return false
			}
		}
		for i := range held {
			if found[traceID(heldTraces+i)]["held"] == 0 {
				return false
			}
		}
		return true
	}
	if !assert.Eventually(t, complete, 30*time.Second, 500*time.Millisecond, "a span with an error is not at the back end") {
		return
	}
	inTwo, tooLate := 0, 0
	for _, tr := range sent.traces {
		spans := found[tr.id]
		if !tr.failed {
			assert.Empty(t, spans, "a trace that nothing keeps")
			continue
		}
		if tr.late() {
			tooLate++
			continue
		}
		assert.Equal(t, 1, spans["engine"], "the span with the error")
		onItsWay := tr.between(up) || tr.between(down)
		if onItsWay && spans["gateway"] == 0 {
			inTwo++
			continue
		}
		assert.Equal(t, 1, spans["gateway"], "the other span of trace %s, sent %v to %v", tr.id, tr.first, tr.second)
	}
	for i := range held {
		assert.Equal(t, 1, found[traceID(heldTraces+i)]["held"], "undecided trace %d", i)
	}
	assert.Less(t, tooLate, len(sent.traces)/4, "of too many nothing can be said: the agent took longer to start anew than a trace waits")
	t.Logf("%d traces; of %d failed ones on their way the other sampler dropped the part without the error; "+
		"%d were decided before their second span came", len(sent.traces), inTwo, tooLate)
}

// tier is a collector of either tier, or the back end.
type tier struct {
	*distribution.Collector
	otlp string // where its OTLP receiver listens
}

func startTier(t *testing.T, name, path, otlp string, env []string, configs ...string) tier {
	t.Helper()
	c, err := distribution.Start(t.Context(), name, filepath.Join(t.TempDir(), name+".log"), nil, env, path, configs...)
	require.NoError(t, err)
	untilTheEnd(t, c.Process)
	return tier{c, otlp}
}

// metric sums up one of the collector's own metrics over its attributes; 0 if it
// has none of that name, as before the first time.
func (s tier) metric(t *testing.T, name string) float64 {
	t.Helper()
	all, err := s.Metrics(t.Context())
	require.NoError(t, err)
	return all.Sum(name, "")
}

// backendFile is a collector that writes what it gets to a file.
type backendFile struct {
	tier
	path string
}

func startBackend(t *testing.T) backendFile {
	t.Helper()
	otlp, path := freeAddr(t), filepath.Join(t.TempDir(), "kept.jsonl")
	return backendFile{startTier(t, "backend", collector(t), otlp, nil,
		"yaml:receivers::otlp::protocols::grpc::endpoint: "+otlp,
		"yaml:exporters::file: {path: "+path+", flush_interval: 100ms}",
		"yaml:service::pipelines::traces: {receivers: [otlp], exporters: [file]}"), path}
}

// spans counts what has arrived, by trace and name.
func (b backendFile) spans(t *testing.T) map[pcommon.TraceID]map[string]int {
	t.Helper()
	text, err := os.ReadFile(b.path)
	require.NoError(t, err)
	found := map[pcommon.TraceID]map[string]int{}
	for line := range bytes.Lines(text) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break // still being written
		}
		td, err := (&ptrace.JSONUnmarshaler{}).UnmarshalTraces(line)
		require.NoError(t, err)
		for _, rs := range td.ResourceSpans().All() {
			for _, ss := range rs.ScopeSpans().All() {
				for _, s := range ss.Spans().All() {
					if found[s.TraceID()] == nil {
						found[s.TraceID()] = map[string]int{}
					}
					found[s.TraceID()][s.Name()]++
				}
			}
		}
	}
	return found
}

func startSampler(t *testing.T, backend string) tier {
	t.Helper()
	otlp := freeAddr(t)
	return startTier(t, "sampler", collector(t), otlp,
		[]string{"SAMPLER_ENDPOINT=" + otlp, "BACKEND_ENDPOINT=" + backend, "STORAGE_DIR=" + t.TempDir()},
		"../../examples/tail-sampling/two-tier-sampler.yaml",
		// What the example leaves at defaults that are long for a test.
		fmt.Sprintf("yaml:processors::spike_sampling: {decision_wait: 20s, decision_wait_after_root_received: %v}", rootWait))
}

// rootWait is how long samplers wait for more of a trace with a local root. The
// agent starts anew within it, as a rule.
const rootWait = 8 * time.Second

// agent is the first tier.
type agent struct {
	tier
	resolver string // the part of its configuration that names the samplers
}

func startAgent(t *testing.T, samplers ...tier) agent {
	t.Helper()
	path := os.Getenv("EBPFLLM_AGENT")
	require.NotEmpty(t, path, "EBPFLLM_AGENT names no file; run 'make test-backends'")
	require.FileExists(t, path, "run 'make build-agent'")
	a := agent{resolver: filepath.Join(t.TempDir(), "resolver.yaml")}
	a.name(t, samplers)
	grpc, http := freeAddr(t), freeAddr(t)
	a.tier = startTier(t, "agent", path, http, []string{"OTLP_GRPC_ENDPOINT=" + grpc, "OTLP_HTTP_ENDPOINT=" + http},
		"../../examples/tail-sampling/two-tier-agent.yaml", ""+a.resolver)
	return a
}

// name writes down who the samplers are.
func (a agent) name(t *testing.T, samplers []tier) {
	t.Helper()
	var hosts []string
	for _, s := range samplers {
		hosts = append(hosts, s.otlp)
	}
	text := fmt.Sprintf("exporters: {load_balancing: {resolver: {static: {hostnames: [%s]}}}}\n", strings.Join(hosts, ", "))
	require.NoError(t, os.WriteFile(a.resolver, []byte(text), 0o600))
}

// period is a time between two others.
type period struct{ from, to time.Time }

// scale makes the agent read another list of samplers, and returns when it goes
// by it.
func (a agent) scale(t *testing.T, samplers ...tier) period {
	t.Helper()
	a.name(t, samplers)
	p := period{from: time.Now()}
	require.NoError(t, syscall.Kill(a.PID(), syscall.SIGHUP))
	await(t, "the agent knows the samplers", func() bool {
		all, err := a.Metrics(t.Context()) // nobody answers while it starts anew
		return err == nil && all.Sum("loadbalancer_num_backends", "") == float64(len(samplers))
	})
	p.to = time.Now()
	return p
}

// heldTraces is the number of the first trace that hold sends.
const heldTraces = 1 << 20

// hold sends failed spans of n traces that hold no local root.
func (a agent) hold(t *testing.T, n int) int {
	t.Helper()
	td := ptrace.NewTraces()
	for i := range n {
		s := add(td, "worker", "held", heldTraces+i)
		s.SetKind(ptrace.SpanKindClient)
		s.SetParentSpanID(pcommon.SpanID{9})
		s.Status().SetCode(ptrace.StatusCodeError)
	}
	again, err := a.send(td)
	require.NoError(t, err)
	require.Zero(t, again)
	return n
}

// streamed is a trace of two spans that are sent one after the other.
type streamed struct {
	id            pcommon.TraceID
	failed        bool      // its second span has an error
	first, second time.Time // when each was taken by the agent
}

// late tells whether the second span may have come after the decision on the
// first, which it follows.
func (tr streamed) late() bool { return tr.second.Sub(tr.first) > rootWait-time.Second }

func (tr streamed) between(p period) bool { return tr.first.Before(p.to) && tr.second.After(p.from) }

// stream is traffic through an agent.
type stream struct {
	stop   chan struct{}
	done   sync.WaitGroup
	traces []streamed
	spans  int
	again  int // spans that were sent for a second time, for it was not known what became of them
	err    error
	t      *testing.T
}

// stream sends two hundred traces a second, the second span of each 300 ms after the
// first; the second span of every fourth has an error.
func (a agent) stream(t *testing.T) *stream {
	t.Helper()
	const apart = 60
	s := &stream{stop: make(chan struct{}), t: t}
	s.done.Go(func() {
		ticks := time.NewTicker(5 * time.Millisecond)
		defer ticks.Stop()
		for stopping := -1; s.err == nil; <-ticks.C {
			td := ptrace.NewTraces()
			n := len(s.traces)
			if stopping < 0 {
				select {
				case <-s.stop:
					stopping = n
				default:
				}
			}
			if stopping < 0 || n < stopping {
				s.traces = append(s.traces, streamed{id: traceID(n), failed: n%4 == 0})
				add(td, "gateway", "gateway", n)
			}
			second := n - apart
			if stopping >= 0 {
				if s.traces[len(s.traces)-1].second != (time.Time{}) {
					return
				}
				for second = len(s.traces) - 1; second > 0 && s.traces[second-1].second.IsZero(); second-- {
				}
			}
			if second >= 0 {
				sp := add(td, "engine", "engine", second)
				sp.SetParentSpanID(pcommon.SpanID{1})
				sp.SetFlags(0x300) // whose parent is remote
				if s.traces[second].failed {
					sp.Status().SetCode(ptrace.StatusCodeError)
				}
			}
			again, err := a.send(td)
			s.again += again * td.SpanCount()
			s.spans += td.SpanCount()
			s.err = err
			now := time.Now()
			if n < len(s.traces) {
				s.traces[n].first = now
			}
			if second >= 0 {
				s.traces[second].second = now
			}
		}
	})
	t.Cleanup(func() { s.end() })
	return s
}

// end sends the second spans that are due, and returns what was sent.
func (s *stream) end() *stream {
	select {
	case <-s.stop:
	default:
		close(s.stop)
	}
	s.done.Wait()
	require.NoError(s.t, s.err)
	return s
}

// send hands spans to the agent as an SDK does, again and again while it starts
// anew. It tells how often it was not known whether the agent had taken them.
func (a agent) send(td ptrace.Traces) (again int, err error) {
	body, err := (&ptrace.ProtoMarshaler{}).MarshalTraces(td)
	if err != nil {
		return 0, err
	}
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		response, err := client.Post("http://"+a.otlp+"/v1/traces", "application/x-protobuf", bytes.NewReader(body))
		if err == nil {
			answer, _ := io.ReadAll(response.Body)
			response.Body.Close()
			switch response.StatusCode {
			case http.StatusOK:
				return again, nil
			case http.StatusServiceUnavailable, http.StatusTooManyRequests:
				err = fmt.Errorf("the agent answers %s: %s", response.Status, answer)
			default:
				return again, fmt.Errorf("the agent answers %s: %s", response.Status, answer)
			}
		} else if !errors.Is(err, syscall.ECONNREFUSED) {
			again++
		}
		if time.Now().After(deadline) {
			return again, err
		}
	}
}

// add adds a span of 10 ms that has just ended.
func add(td ptrace.Traces, service, name string, trace int) ptrace.Span {
	rs := td.ResourceSpans().AppendEmpty()
	rs.Resource().Attributes().PutStr("service.name", service)
	s := rs.ScopeSpans().AppendEmpty().Spans().AppendEmpty()
	s.SetTraceID(traceID(trace))
	s.SetSpanID(pcommon.SpanID{1})
	if name != "gateway" {
		s.SetSpanID(pcommon.SpanID{2})
	}
	s.SetName(name)
	s.SetKind(ptrace.SpanKindServer)
	now := time.Now()
	s.SetStartTimestamp(pcommon.NewTimestampFromTime(now.Add(-10 * time.Millisecond)))
	s.SetEndTimestamp(pcommon.NewTimestampFromTime(now))
	return s
}

// traceID makes the id of the nth trace.
func traceID(n int) (id pcommon.TraceID) {
	binary.BigEndian.PutUint64(id[:8], uint64(n+1)*0x9e3779b97f4a7c15)
	binary.BigEndian.PutUint64(id[8:], uint64(n+1)*0xd1342543de82ef95)
	return id
}

// await waits for what has to come about before the test goes on.
func await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	require.Eventually(t, holds, time.Minute, 100*time.Millisecond, what)
}
