//go:build linux && amd64

package ebpfllmreceiver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componentstatus"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/receivertest"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/metric/metricdata/metricdatatest"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver/internal/metadata"
	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver/internal/metadatatest"
)

// fakeKernel does as the test tells it.
type fakeKernel struct {
	events chan probe.Event // each is handled before the next is taken
	fail   chan error       // ends the reading

	mu      sync.Mutex
	cfg     probe.Config
	tracked map[uint32]probe.Tracking
	ports   map[uint16]bool
	opened  int
	closed  int
	counts  probe.Counters
	drops   int
}

func newFakeKernel() *fakeKernel {
	return &fakeKernel{
		events: make(chan probe.Event), fail: make(chan error),
		tracked: map[uint32]probe.Tracking{}, ports: map[uint16]bool{},
	}
}

func (f *fakeKernel) open(cfg probe.Config, _ *zap.Logger) (source, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.opened++
	f.cfg = cfg
	return f, nil
}

func (f *fakeKernel) Report() []probe.StageReport {
	return []probe.StageReport{
		{Stage: stage.CPU, Available: true, Hook: "tp_btf/sched_switch"},
		{Stage: stage.PageFault, Available: true, Hook: "perf_event/page_fault", Reason: "in part: no kernel faults"},
		{Stage: stage.Qdisc, Reason: "this kernel has no tracepoint net_dev_queue (needs Linux 2.6.37)"},
	}
}

func (f *fakeKernel) Track(pid uint32, t probe.Tracking) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tracked[pid] = t
	return nil
}

func (f *fakeKernel) Untrack(pid uint32) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.tracked, pid)
	return nil
}

func (f *fakeKernel) AddPort(_ uint32, port uint16) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ports[port] = true
	return nil
}

func (f *fakeKernel) DropPorts() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drops++
	return nil
}

func (f *fakeKernel) Run(ctx context.Context, handle func(probe.Event)) error {
	for {
		select {
		case e := <-f.events:
			handle(e)
		case err := <-f.fail:
			return err
		case <-ctx.Done():
			return nil
		}
	}
}

func (f *fakeKernel) Counters() (probe.Counters, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts, nil
}

func (f *fakeKernel) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed++
	return nil
}

func (f *fakeKernel) tracking(pid int) (probe.Tracking, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t, ok := f.tracked[uint32(pid)]
	return t, ok
}

// settle returns when everything told so far was handled.
func (f *fakeKernel) settle() { f.events <- &probe.Fork{} }

// serve tells of one whole request to pid that lasts 300 ms from start.
func (f *fakeKernel) serve(pid int, cookie uint64, start uint64, request string) {
	s := probe.Socket{Cookie: cookie, Seq: 1, Time: start + 1*ms}
	f.events <- &probe.RequestHead{
		Socket: s, PID: uint32(pid), TID: uint32(pid), Start: start, Lane: probe.Lane{PID: uint32(pid), ID: 1},
		Family: 2, LocalPort: 8080, Flags: probe.HeadFlags{Complete: true}, Bytes: []byte(request),
	}
	s.Time = start + 300*ms
	f.events <- &probe.ResponseHead{
		Socket: s, Flags: probe.HeadFlags{Complete: true}, Bytes: []byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"),
	}
	p := &probe.Progress{Socket: s, Lane: probe.Lane{PID: uint32(pid), ID: 1}, Start: start, FirstRead: start + 1*ms, Received: uint64(len(request)), Sent: 40, Chunks: 1}
	p.Exclusive[stage.CPU] = 299e6
	f.events <- p
}

const (
	get    = "GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
	linked = "GET /v1/chat/completions HTTP/1.1\r\nHost: a\r\ntraceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n\r\n"
)

// rig is a receiver on a fake kernel.
type rig struct {
	*fakeKernel
	cfg       *Config
	settings  receiver.Settings
	telemetry *componenttest.Telemetry
	logs      *observer.ObservedLogs
	traces    *consumertest.TracesSink
	metrics   *consumertest.MetricsSink
}

func newRig(t *testing.T, cfg *Config) *rig {
	t.Helper()
	tel := componenttest.NewTelemetry()
	t.Cleanup(func() { assert.NoError(t, tel.Shutdown(context.Background())) })
	set := receivertest.NewNopSettings(metadata.Type)
	set.TelemetrySettings = tel.NewTelemetrySettings()
	core, logs := observer.New(zapcore.DebugLevel)
	set.Logger = zap.New(core)
	return &rig{
		fakeKernel: newFakeKernel(), cfg: cfg, settings: set, telemetry: tel, logs: logs,
		traces: &consumertest.TracesSink{}, metrics: &consumertest.MetricsSink{},
	}
}

func (r *rig) joinTraces() *member {
	return join(r.settings, r.cfg, r.open, func(in *instance) { in.traces = r.traces })
}

func (r *rig) joinMetrics() *member {
	return join(r.settings, r.cfg, r.open, func(in *instance) { in.metrics = r.metrics })
}

func start(t *testing.T, members ...*member) {
	t.Helper()
	for _, m := range members {
		require.NoError(t, m.Start(t.Context(), componenttest.NewNopHost()))
	}
}

func stop(t *testing.T, members ...*member) {
	t.Helper()
	for _, m := range members {
		require.NoError(t, m.Shutdown(context.Background()))
	}
}

func defaults() *Config { return createDefaultConfig().(*Config) }

// child starts a process that does nothing until the test ends.
func child(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}

func forPID(pid int) *Config {
	cfg := defaults()
	cfg.Targets = []TargetConfig{{PID: pid}}
	return cfg
}

func TestPipelinesShareOneKernelSide(t *testing.T) {
	pid := child(t)
	for name, pipelines := range map[string]func(*rig) []*member{
		"traces":              func(r *rig) []*member { return []*member{r.joinTraces()} },
		"metrics":             func(r *rig) []*member { return []*member{r.joinMetrics()} },
		"both":                func(r *rig) []*member { return []*member{r.joinTraces(), r.joinMetrics()} },
		"both, the other way": func(r *rig) []*member { return []*member{r.joinMetrics(), r.joinTraces()} },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, forPID(pid))
			members := pipelines(r)
			start(t, members[1:]...)
			assert.Zero(t, r.opened*(len(members)-1), "what is behind the others may not be ready")
			start(t, members[0])
			r.serve(pid, 1, 1000*ms, get)
			r.settle()
			stop(t, members[0])
			assert.Equal(t, 1, r.closed, "what is behind it ends next")
			spans, points := r.traces.SpanCount(), r.metrics.DataPointCount()
			stop(t, members[1:]...)
			assert.Equal(t, spans, r.traces.SpanCount())
			assert.Equal(t, points, r.metrics.DataPointCount())
			assert.Equal(t, 1, r.opened)
			assert.Equal(t, 1, r.closed)
			if name != "metrics" {
				assert.Equal(t, 1, r.traces.SpanCount())
			} else {
				assert.Zero(t, r.traces.SpanCount())
			}
			assert.Equal(t, name != "traces", r.metrics.DataPointCount() > 0)
			assert.NotContains(t, instances.m, r.cfg, "forgotten when the last is shut down")
		})
	}
}

func TestShutdownIsIdempotentAndNeedsNoStart(t *testing.T) {
	r := newRig(t, defaults())
	a, b := r.joinTraces(), r.joinMetrics()
	stop(t, a, a)
	start(t, b)
	stop(t, b, b, a)
	assert.Equal(t, 1, r.closed)
	require.Error(t, b.Start(t.Context(), componenttest.NewNopHost()), "no way back")

	a = r.joinTraces()
	start(t, a)
	stop(t, a)
	assert.Equal(t, 2, r.opened, "but a new component starts anew")
}

func TestAPipelineThatComesTooLateIsNotSilentlyEmpty(t *testing.T) {
	r := newRig(t, defaults())
	a := r.joinTraces()
	start(t, a)
	b := r.joinMetrics()
	require.Error(t, b.Start(t.Context(), componenttest.NewNopHost()))
	stop(t, b, a)
	assert.Equal(t, 1, r.closed)
}

func TestAKernelSideThatCannotStartIsAnErrorAtStart(t *testing.T) {
	r := newRig(t, defaults())
	refusal := errors.New("missing CAP_BPF: run the collector as root")
	m := join(r.settings, r.cfg, func(probe.Config, *zap.Logger) (source, error) { return nil, refusal },
		func(in *instance) { in.traces = r.traces })
	err := m.Start(t.Context(), componenttest.NewNopHost())
	require.ErrorIs(t, err, refusal)
	assert.ErrorContains(t, err, "ebpfllm")
	stop(t, m)
	assert.NotContains(t, instances.m, r.cfg)
}

func TestTheConfigurationReachesTheKernelSide(t *testing.T) {
	cfg := load(t, "all")
	r := newRig(t, cfg)
	m := r.joinTraces()
	start(t, m)
	assert.Equal(t, 32<<20, r.fakeKernel.cfg.RingBytes)
	assert.Equal(t, cfg.MinDuration, r.fakeKernel.cfg.MinDuration)
	assert.Equal(t, []stage.Stage{stage.Qdisc}, r.fakeKernel.cfg.Disabled)
	stop(t, m)
}

func TestTheStartUpReportSaysWhatIsMeasuredAndWhatNot(t *testing.T) {
	r := newRig(t, defaults())
	m := r.joinTraces()
	start(t, m)
	stop(t, m)
	reports := r.logs.FilterMessage("Kernel side loaded").All()
	require.Len(t, reports, 1)
	fields := reports[0].ContextMap()
	assert.Equal(t, []any{"cpu: tp_btf/sched_switch", "page_fault: perf_event/page_fault (in part: no kernel faults)"}, fields["measured"])
	assert.Equal(t, []any{"qdisc: this kernel has no tracepoint net_dev_queue (needs Linux 2.6.37)"}, fields["not_measured"])
}

func TestARequestThatIsOpenAtShutdownIsGivenOnAsIncomplete(t *testing.T) {
	pid := child(t)
	r := newRig(t, forPID(pid))
	m := r.joinTraces()
	start(t, m)
	s := probe.Socket{Cookie: 5, Seq: 1, Time: 1001 * ms}
	r.events <- &probe.RequestHead{
		Socket: s, PID: uint32(pid), Start: 1000 * ms, Family: 2,
		Flags: probe.HeadFlags{Complete: true}, Bytes: []byte(linked),
	}
	s.Time = 1100 * ms
	r.events <- &probe.ResponseHead{
		Socket: s, Flags: probe.HeadFlags{Complete: true},
		Bytes: []byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"),
	}
	r.events <- &probe.Progress{Socket: s, Start: 1000 * ms, FirstRead: 1001 * ms, Received: 100, Sent: 200, Chunks: 2}
	r.settle()
	stop(t, m) // in the middle of the stream
	require.Equal(t, 1, r.traces.SpanCount())
	span := r.traces.AllTraces()[0].ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(0)
	assert.Equal(t, requestSpan, span.Name())
	incomplete, _ := span.Attributes().Get("ebpfllm.incomplete")
	assert.True(t, incomplete.Bool())
}

func TestHostileBytesAreCountedAndLoseNothingElse(t *testing.T) {
	pid := child(t)
	r := newRig(t, forPID(pid))
	m := r.joinTraces()
	start(t, m)
	valid := "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"
	for i, request := range []string{
		"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\n" + valid + valid + "\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\ntraceparent: nonsense\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\ntraceparent: cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-" + strings.Repeat("x", 9000) + "\r\n\r\n",
		linked,
	} {
		r.serve(pid, uint64(i+1), uint64(i+1)*1000*ms, request)
	}
	r.events <- &probe.Tick{Now: 20_000 * ms}
	r.events <- &probe.Tick{Now: 30_000 * ms}
	r.settle()
	metadatatest.AssertEqualReceiverEbpfllmMessagesUnparsed(t, r.telemetry, []metricdata.DataPoint[int64]{
		reason("request_malformed", 1), reason("traceparent_repeated", 1), reason("traceparent_malformed", 1), reason("traceparent_too_long", 1),
	}, metricdatatest.IgnoreTimestamp())
	metadatatest.AssertEqualReceiverEbpfllmRequestsLinked(t, r.telemetry, []metricdata.DataPoint[int64]{
		{Value: 1, Attributes: attribute.NewSet(attribute.String("method", "traceparent"))},
		{Value: 3, Attributes: attribute.NewSet(attribute.String("method", "none"))},
	}, metricdatatest.IgnoreTimestamp())
	stop(t, m)

	parents := 0
	for _, batch := range r.traces.AllTraces() {
		for _, s := range batch.ResourceSpans().At(0).ScopeSpans().At(0).Spans().All() {
			if s.Kind() == ptrace.SpanKindInternal {
				parents++
				assert.Equal(t, "0af7651916cd43dd8448eb211c80319c", s.TraceID().String())
				assert.Equal(t, "b7ad6b7169203331", s.ParentSpanID().String())
			}
		}
	}
	assert.Equal(t, 4, r.traces.SpanCount())
	assert.Equal(t, 1, parents)
}

// Two requests are in flight on one thread, which waits for a lock: the spans of
// both come while the receiver runs, and name each other.
func TestASharedStallIsLinkedFromEventsToSpans(t *testing.T) {
	pid := child(t)
	r := newRig(t, forPID(pid))
	m := r.joinTraces()
	start(t, m)
	lane := probe.Lane{PID: uint32(pid), ID: 1}
	var answers []probe.Event
	for i, request := range []string{linked, get} {
		s := probe.Socket{Cookie: uint64(i + 1), Seq: 1, Time: uint64(1001+i) * ms}
		begin := s.Time - ms
		r.events <- &probe.RequestHead{
			Socket: s, PID: uint32(pid), TID: uint32(pid), Start: begin, Lane: lane, Family: 2,
			Flags: probe.HeadFlags{Complete: true}, Bytes: []byte(request),
		}
		s.Time = 1100 * ms
		answers = append(answers,
			&probe.ResponseHead{Socket: s, Flags: probe.HeadFlags{Complete: true}, Bytes: []byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")},
			&probe.Progress{Socket: s, Lane: lane, Start: begin, FirstRead: begin + ms, Received: uint64(len(request)), Sent: 40, Chunks: 1})
	}
	r.events <- &probe.Tick{Now: 1010 * ms}
	r.events <- &probe.Occurrence{
		Socket: probe.Socket{Time: 1090 * ms}, PID: uint32(pid), TID: uint32(pid), Lane: lane,
		Stage: stage.Lock, Start: 1020 * ms, Duration: 70e6, Syscall: -1,
	}
	for _, e := range answers {
		r.events <- e
	}
	r.events <- &probe.Tick{Now: 1110 * ms}
	r.settle()
	assert.Zero(t, r.traces.SpanCount(), "others may yet be found that it delayed")
	r.events <- &probe.Tick{Now: 2000 * ms}
	r.settle()
	require.Eventually(t, func() bool { return r.traces.SpanCount() == 4 }, 5*time.Second, time.Millisecond)
	stop(t, m)
	require.Equal(t, 4, r.traces.SpanCount())

	requests, stalls := map[pcommon.TraceID]pcommon.SpanID{}, []ptrace.Span{}
	for _, batch := range r.traces.AllTraces() {
		for _, s := range batch.ResourceSpans().At(0).ScopeSpans().At(0).Spans().All() {
			if s.Name() == requestSpan {
				requests[s.TraceID()] = s.SpanID()
			} else {
				stalls = append(stalls, s)
			}
		}
	}
	require.Len(t, requests, 2)
	require.Len(t, stalls, 2)
	for i, s := range stalls {
		method, _ := s.Attributes().Get("ebpfllm.link.method")
		assert.Equal(t, "shared", method.Str())
		assert.Equal(t, requests[s.TraceID()], s.ParentSpanID())
		require.Equal(t, 1, s.Links().Len())
		other := s.Links().At(0)
		assert.Equal(t, stalls[1-i].TraceID(), other.TraceID())
		assert.Equal(t, stalls[1-i].ParentSpanID(), other.SpanID())
		assert.Zero(t, s.DroppedLinksCount())
	}
}

func reason(name string, n int64) metricdata.DataPoint[int64] {
	return metricdata.DataPoint[int64]{Value: n, Attributes: attribute.NewSet(attribute.String("reason", name))}
}

func TestLossesAreSeenInTheSelfMetrics(t *testing.T) {
	r := newRig(t, defaults())
	r.counts = probe.Counters{
		Sent:    map[string]uint64{"progress": 10},
		Records: map[string]uint64{"progress": 7},
		Lost:    map[string]uint64{"ring_full_progress": 3},
		MapFull: map[string]uint64{"lanes": 2},
		Missed:  map[string]uint64{"contention_begin": 5, "sched_switch": 0},
	}
	m := r.joinMetrics()
	start(t, m)
	metadatatest.AssertEqualReceiverEbpfllmRecords(t, r.telemetry, []metricdata.DataPoint[int64]{
		{Value: 7, Attributes: attribute.NewSet(attribute.String("kind", "progress"))},
	}, metricdatatest.IgnoreTimestamp())
	metadatatest.AssertEqualReceiverEbpfllmRecordsSent(t, r.telemetry, []metricdata.DataPoint[int64]{
		{Value: 10, Attributes: attribute.NewSet(attribute.String("kind", "progress"))},
	}, metricdatatest.IgnoreTimestamp())
	metadatatest.AssertEqualReceiverEbpfllmRecordsLost(t, r.telemetry, []metricdata.DataPoint[int64]{
		reason("ring_full_progress", 3), reason("export_queue_full", 0), reason("occurrence_unclaimed", 0), reason("metric_processes_full", 0),
	}, metricdatatest.IgnoreTimestamp())
	metadatatest.AssertEqualReceiverEbpfllmMapFull(t, r.telemetry, []metricdata.DataPoint[int64]{
		{Value: 2, Attributes: attribute.NewSet(attribute.String("map", "lanes"))},
	}, metricdatatest.IgnoreTimestamp())
	metadatatest.AssertEqualReceiverEbpfllmProgramsMissed(t, r.telemetry, []metricdata.DataPoint[int64]{
		{Value: 5, Attributes: attribute.NewSet(attribute.String("program", "contention_begin"))},
		{Value: 0, Attributes: attribute.NewSet(attribute.String("program", "sched_switch"))},
	}, metricdatatest.IgnoreTimestamp())
	metadatatest.AssertEqualReceiverEbpfllmStageAvailable(t, r.telemetry, []metricdata.DataPoint[int64]{
		{Value: 1, Attributes: attribute.NewSet(attribute.String("stage", "cpu"), attribute.String("hook", "tp_btf/sched_switch"), attribute.String("reason", ""))},
		{Value: 1, Attributes: attribute.NewSet(attribute.String("stage", "page_fault"), attribute.String("hook", "perf_event/page_fault"), attribute.String("reason", "in part: no kernel faults"))},
		{Value: 0, Attributes: attribute.NewSet(attribute.String("stage", "qdisc"), attribute.String("hook", ""), attribute.String("reason", "this kernel has no tracepoint net_dev_queue (needs Linux 2.6.37)"))},
	}, metricdatatest.IgnoreTimestamp())
	stop(t, m)
}

// The end of a request was lost. As soon as the counters tell of losses, a stall of its
// thread is not said to have delayed it, too.
func TestAfterALossAStallIsNotSharedWithWhatMayBeOver(t *testing.T) {
	pid := child(t)
	r := newRig(t, forPID(pid))
	m := r.joinTraces()
	start(t, m)
	lane := probe.Lane{PID: uint32(pid), ID: 1}
	now := probe.Now()
	ask := func(cookie, at uint64) {
		r.events <- &probe.RequestHead{
			Socket: probe.Socket{Cookie: cookie, Seq: 1, Time: at}, PID: uint32(pid), TID: uint32(pid), Start: at, Lane: lane, Family: 2,
			Flags: probe.HeadFlags{Complete: true}, Bytes: []byte(get),
		}
	}
	ask(1, now)
	r.events <- &probe.Tick{Now: now}
	r.mu.Lock()
	r.counts.Lost = map[string]uint64{"ring_full_progress": 1, "ring_full_close": 1}
	r.mu.Unlock()
	r.events <- &probe.Tick{Now: now + countInterval}

	begin := now + 10*countInterval
	ask(2, begin)
	r.events <- &probe.Occurrence{
		Socket: probe.Socket{Time: begin + 90*ms}, PID: uint32(pid), TID: uint32(pid), Lane: lane,
		Stage: stage.Lock, Start: begin + 20*ms, Duration: 70e6, Syscall: -1,
	}
	s := probe.Socket{Cookie: 2, Seq: 1, Time: begin + 100*ms}
	r.events <- &probe.ResponseHead{Socket: s, Flags: probe.HeadFlags{Complete: true}, Bytes: []byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")}
	r.events <- &probe.Progress{Socket: s, Lane: lane, Start: begin, FirstRead: begin, Received: uint64(len(get)), Sent: 40, Chunks: 1}
	r.events <- &probe.Tick{Now: begin + 2*countInterval}
	r.settle()
	require.Eventually(t, func() bool { return r.traces.SpanCount() == 2 }, 5*time.Second, time.Millisecond, "the stall and its request")
	for _, batch := range r.traces.AllTraces() {
		for _, span := range batch.ResourceSpans().At(0).ScopeSpans().At(0).Spans().All() {
			assert.Contains(t, []string{"lock", requestSpan}, span.Name())
			_, shared := span.Attributes().Get("ebpfllm.shared_by")
			assert.False(t, shared, span.Name())
			assert.Zero(t, span.Links().Len()+int(span.DroppedLinksCount()))
		}
	}
	stop(t, m)
}

func TestMetricsComeAtTheCollectionInterval(t *testing.T) {
	pid := child(t)
	r := newRig(t, forPID(pid))
	m := r.joinMetrics()
	start(t, m)
	r.events <- &probe.Tick{Now: 100 * ms}
	r.serve(pid, 1, 1000*ms, linked)
	r.events <- &probe.Tick{Now: 9000 * ms}
	r.settle()
	assert.Empty(t, r.metrics.AllMetrics())
	r.events <- &probe.Tick{Now: 10_100 * ms}
	waitFor(t, func() bool { return len(r.metrics.AllMetrics()) == 1 })
	got := r.metrics.AllMetrics()[0]
	assert.Len(t, points(got, "gen_ai.server.request.duration"), 1)
	name, _ := got.ResourceMetrics().At(0).Resource().Attributes().Get("service.name")
	assert.Equal(t, "sleep", name.Str())
	stop(t, m)
	assert.Len(t, r.metrics.AllMetrics(), 2, "and once more at the end")
}

func TestTargetsAreTrackedAsTheyComeAndGo(t *testing.T) {
	cfg := defaults()
	cfg.Targets = []TargetConfig{{Executable: "sleep", CommandLine: "^sleep 1000$"}, {Executable: "ebpfllm-no-such-program"}}
	before := child(t)
	r := newRig(t, cfg)
	m := r.joinTraces()
	start(t, m)
	_, ok := r.tracking(before)
	assert.True(t, ok, "it was there before")
	assert.Len(t, r.logs.FilterMessageSnippet("No process matches a configured target yet").All(), 1)

	after := child(t)
	waitFor(t, func() bool { // the child has become sleep
		exe, err := os.Readlink("/proc/" + strconv.Itoa(after) + "/exe")
		return err == nil && strings.HasSuffix(exe, "sleep")
	})
	r.events <- &probe.Exec{PID: uint32(after)}
	r.settle()
	_, ok = r.tracking(after)
	assert.True(t, ok)
	r.events <- &probe.Exit{PID: uint32(after)}
	r.settle()
	_, ok = r.tracking(after)
	assert.False(t, ok)
	r.events <- &probe.Tick{Now: 1 * ms}
	r.events <- &probe.Tick{Now: 1*ms + rescanInterval}
	r.settle()
	_, ok = r.tracking(after)
	assert.True(t, ok, "a rescan finds what events missed: it has not really ended")
	assert.Len(t, r.logs.FilterMessageSnippet("No process matches a configured target yet").All(), 1, "said once")
	stop(t, m)
}

func TestWhatBeginsToListenAndATargetsEndBringTheNextRescanForward(t *testing.T) {
	const none = 1 << 22 // no process has this pid
	for _, tt := range []struct {
		name    string
		event   func(target int) probe.Event
		hurries bool
	}{
		{"a daemon's parent, which has ended already, listens", func(int) probe.Event { return &probe.Listen{PID: none, Port: 80} }, true},
		{"a target ends", func(target int) probe.Event { return &probe.Exit{PID: uint32(target)} }, true},
		{"another process ends", func(int) probe.Event { return &probe.Exit{PID: none} }, false},
		{"nothing happens", func(int) probe.Event { return &probe.Fork{} }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := defaults()
			cfg.Targets = []TargetConfig{{Executable: "sleep", CommandLine: "^sleep 1000$"}}
			target := child(t)
			r := newRig(t, cfg)
			m := r.joinTraces()
			start(t, m)
			defer stop(t, m)
			r.events <- &probe.Tick{Now: 1 * ms}
			missed := child(t) // nothing tells of it
			waitFor(t, func() bool {
				exe, err := os.Readlink("/proc/" + strconv.Itoa(missed) + "/exe")
				return err == nil && strings.HasSuffix(exe, "sleep")
			})
			r.events <- tt.event(target)
			r.events <- &probe.Tick{Now: 2 * ms}
			r.settle()
			_, ok := r.tracking(missed)
			assert.False(t, ok, "at most one a second")
			r.events <- &probe.Tick{Now: rescanInterval - 1*ms} // before it is due by itself
			r.settle()
			_, ok = r.tracking(missed)
			assert.Equal(t, tt.hurries, ok)
		})
	}
}

func TestPortsAreToldAgainAtEachRescan(t *testing.T) {
	cmd, port := listener(t)
	r := newRig(t, forPID(cmd.Process.Pid))
	m := r.joinTraces()
	start(t, m)
	defer stop(t, m)
	watched := func() bool {
		r.settle()
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.ports[port]
	}
	require.True(t, watched())
	r.mu.Lock()
	delete(r.ports, port) // another process that shared it has closed its socket
	r.mu.Unlock()
	r.events <- &probe.Tick{Now: 1 * ms}
	assert.False(t, watched())
	r.events <- &probe.Tick{Now: 1*ms + rescanInterval}
	assert.True(t, watched())
}

func TestProcessesThatCannotBeReadAreSaidOnceWithTheRemedyThatHelps(t *testing.T) {
	for _, tt := range []struct {
		capable bool
		level   zapcore.Level
		message string
	}{
		{false, zapcore.WarnLevel, "give the collector CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"},
		{true, zapcore.InfoLevel, "are hidden from the collector"},
	} {
		core, logs := observer.New(zapcore.InfoLevel)
		k := &kernelSide{logger: zap.New(core), complained: map[string]bool{}}
		k.sayDenied(3, tt.capable)
		k.sayDenied(4, tt.capable)
		require.Equal(t, 1, logs.Len())
		entry := logs.All()[0]
		assert.Equal(t, tt.level, entry.Level)
		assert.Contains(t, entry.Message, tt.message)
		assert.Equal(t, int64(3), entry.ContextMap()["processes"])
	}
}

// listener starts a process that listens on a port until the test ends. The
// program under test is itself excluded, so it cannot be the one.
func listener(t *testing.T) (*exec.Cmd, uint16) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "-test.run=^TestWithoutTargetsAServerIsTrackedFullyOnceAskedForAnLLM$")
	cmd.Env = append(os.Environ(), "EBPFLLM_TEST_LISTEN=1", "OTEL_SERVICE_NAME=listener")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	var port uint16
	_, err = fmt.Fscan(out, &port)
	require.NoError(t, err)
	return cmd, port
}

func TestWithoutTargetsAServerIsTrackedFullyOnceAskedForAnLLM(t *testing.T) {
	if os.Getenv("EBPFLLM_TEST_LISTEN") != "" {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		fmt.Println(l.Addr().(*net.TCPAddr).Port)
		select {}
	}
	cmd, port := listener(t)
	pid := cmd.Process.Pid

	r := newRig(t, defaults())
	m := r.joinTraces()
	start(t, m)
	tracking, ok := r.tracking(pid)
	require.True(t, ok)
	assert.True(t, tracking.Candidate)
	assert.True(t, tracking.IsGo)
	assert.True(t, r.ports[port])
	_, ok = r.tracking(os.Getpid())
	assert.False(t, ok, "never itself")

	ask := func(path string) {
		r.events <- &probe.RequestHead{
			Socket: probe.Socket{Cookie: 1, Seq: 1, Time: 1}, PID: uint32(pid),
			Flags: probe.HeadFlags{Candidate: true, Complete: true}, Bytes: []byte("POST " + path + " HTTP/1.1\r\n"),
		}
		r.settle()
		tracking, _ = r.tracking(pid)
	}
	ask("/index.html")
	assert.True(t, tracking.Candidate)
	ask("/v1/chat/completions?key=1")
	assert.False(t, tracking.Candidate)
	found := r.logs.FilterMessage("Target found").All()
	require.Len(t, found, 1)
	assert.Equal(t, "listener", found[0].ContextMap()["service"])
	stop(t, m)
}

func TestReadingThatFailsIsReported(t *testing.T) {
	r := newRig(t, defaults())
	m := r.joinTraces()
	host := &statusHost{events: make(chan *componentstatus.Event, 1)}
	require.NoError(t, m.Start(t.Context(), host))
	r.fail <- errors.New("ring gone")
	event := <-host.events
	assert.Equal(t, componentstatus.StatusPermanentError, event.Status())
	stop(t, m)
	assert.Equal(t, 1, r.closed)
}

type statusHost struct {
	events chan *componentstatus.Event
}

func (*statusHost) GetExtensions() map[component.ID]component.Component { return nil }

func (h *statusHost) Report(e *componentstatus.Event) { h.events <- e }

func TestThePIDNamespaceMustBeTheHosts(t *testing.T) {
	dir := t.TempDir()
	require.Error(t, checkNamespace(dir))
	require.NoError(t, os.MkdirAll(dir+"/self/ns", 0o755))
	require.NoError(t, os.Symlink("pid:[4026532999]", dir+"/self/ns/pid"))
	require.ErrorContains(t, checkNamespace(dir), "hostPID: true")
	require.NoError(t, os.Remove(dir+"/self/ns/pid"))
	require.NoError(t, os.Symlink(initPIDNamespace, dir+"/self/ns/pid"))
	require.NoError(t, checkNamespace(dir), "a kernel without time namespaces")
	require.NoError(t, os.Symlink("time:[4026532999]", dir+"/self/ns/time"))
	require.ErrorContains(t, checkNamespace(dir), "unshare --time")
	require.NoError(t, os.Remove(dir+"/self/ns/time"))
	require.NoError(t, os.Symlink(initTimeNamespace, dir+"/self/ns/time"))
	require.NoError(t, checkNamespace(dir))
}

// What a target is asked by ways that are not measured is counted, and said once with the remedy.
func TestRequestsByOtherWaysAreSaid(t *testing.T) {
	r := newRig(t, forPID(child(t)))
	r.counts = probe.Counters{Unwatched: map[string]uint64{"unix_socket": 3, "mptcp": 0}}
	m := r.joinMetrics()
	start(t, m)
	for at := range uint64(5) {
		r.events <- &probe.Tick{Now: (at + 1) * 2000 * ms}
	}
	r.settle()
	metadatatest.AssertEqualReceiverEbpfllmMessagesUnparsed(t, r.telemetry, []metricdata.DataPoint[int64]{
		{Value: 3, Attributes: attribute.NewSet(attribute.String("reason", "unix_socket"))},
		{Value: 0, Attributes: attribute.NewSet(attribute.String("reason", "mptcp"))},
	}, metricdatatest.IgnoreTimestamp())
	stop(t, m)
	assert.Len(t, r.logs.FilterMessageSnippet("over a Unix-domain socket").FilterLevelExact(zapcore.WarnLevel).All(), 1)
	assert.Empty(t, r.logs.FilterMessageSnippet("Multipath TCP").All())
}

// Each look at all processes ends with the ports that nobody was found to listen on.
func TestPortsAreDroppedAfterEachRescan(t *testing.T) {
	r := newRig(t, forPID(child(t)))
	m := r.joinMetrics()
	start(t, m)
	r.events <- &probe.Tick{Now: 1000 * ms}
	r.settle()
	assert.Zero(t, r.drops)
	r.events <- &probe.Tick{Now: 1000*ms + rescanInterval}
	r.settle()
	stop(t, m)
	assert.Equal(t, 1, r.drops)
}

func TestAPipelineThatIsTooSlowLosesSpansAndSaysSo(t *testing.T) {
	pid := child(t)
	r := newRig(t, forPID(pid))
	hang := make(chan struct{})
	next := slow{TracesSink: r.traces, hang: hang}
	m := join(r.settings, r.cfg, r.open, func(in *instance) { in.traces = &next })
	start(t, m)
	k := m.instance.side
	k.traces.limit = 1
	for i := range 4 {
		r.serve(pid, uint64(i+1), uint64(i+1)*1000*ms, get)
		r.events <- &probe.Tick{Now: uint64(i+1)*1000*ms + 400*ms}
	}
	r.events <- &probe.Tick{Now: 60_000 * ms}
	r.settle()
	close(hang)
	stop(t, m)
	lost := k.counts.Load().lost["export_queue_full"]
	assert.Positive(t, lost)
	assert.Equal(t, uint64(4), lost+uint64(r.traces.SpanCount()))
	assert.Len(t, r.logs.FilterMessageSnippet("some are lost").FilterLevelExact(zapcore.WarnLevel).All(), 1)
}

type slow struct {
	*consumertest.TracesSink
	hang chan struct{}
}

func (s *slow) ConsumeTraces(ctx context.Context, t ptrace.Traces) error {
	<-s.hang
	return s.TracesSink.ConsumeTraces(ctx, t)
}
