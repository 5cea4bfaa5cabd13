//go:build linux && amd64

package ebpfllmreceiver

import (
	"context"
	"encoding/binary"
	"path/filepath"
	"strings"
	"testing"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/golden"
	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/pdatatest/ptracetest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/metric/metricdata/metricdatatest"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/clock"
	"github.com/ebpfllm/ebpfllm/internal/httphead"
	"github.com/ebpfllm/ebpfllm/internal/stage"
	"github.com/ebpfllm/ebpfllm/internal/target"
	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver/internal/metadata"
	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver/internal/metadatatest"
)

const (
	ms = uint64(1e6)
	// wallStart is the wall time at which the monotonic clock of these tests is 0.
	wallStart = clock.Offset(1_700_000_000_000_000_000)
)

// bench is a recorder with everything around it under the test's hand.
type bench struct {
	*recorder
	telemetry *componenttest.Telemetry
	offset    clock.Offset
	processes map[uint32]*process
}

func newBench(t *testing.T) *bench {
	t.Helper()
	tel := componenttest.NewTelemetry()
	t.Cleanup(func() { assert.NoError(t, tel.Shutdown(context.Background())) })
	builder, err := metadata.NewTelemetryBuilder(tel.NewTelemetrySettings())
	require.NoError(t, err)
	t.Cleanup(builder.Shutdown)
	b := &bench{telemetry: tel, offset: wallStart, processes: map[uint32]*process{
		10: {Process: target.Process{PID: 10, Executable: "llama-server", Identity: target.Identity{
			ServiceName: "chat", Cgroup: "0::/llm.slice", ContainerID: "c0ffee",
		}}, host: "node-1"},
		11: {Process: target.Process{PID: 11}},
	}}
	b.recorder = newRecorder(func(pid uint32) *process { return b.processes[pid] }, func() clock.Offset { return b.offset }, builder)
	b.spans = true
	b.metrics = newMetricStore(func() uint64 { return b.offset.Unix(5000 * ms) })
	var n uint64 // ids count up from 1
	b.random = func(id []byte) {
		n++
		clear(id)
		binary.BigEndian.PutUint64(id[len(id)-8:], n)
	}
	return b
}

func (b *bench) taken() ptrace.Traces {
	t, _ := b.take()
	return t
}

func key(n int) assemble.Key { return assemble.Key{Cookie: 99, Seq: uint32(n)} }

// streamed is a linked streaming request with every field set.
func streamed() *assemble.Request {
	r := &assemble.Request{
		Key: key(1), PID: 10, TID: 12,
		Peer: assemble.Peer{
			Family: 2, LocalAddr: [16]byte{127, 0, 0, 1}, RemoteAddr: [16]byte{10, 0, 0, 7}, LocalPort: 8080, RemotePort: 40000,
		},
		Head: httphead.Head{
			Method: "POST", Path: "/v1/chat/completions", Host: "llm.example", Proto: "1.1",
			TraceParent: "00-0102030405060708090a0b0c0d0e0f10-1112131415161718-01", TraceState: "ot=rv:0123456789abcd",
			TraceID:  [16]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
			ParentID: [8]byte{17, 18, 19, 20, 21, 22, 23, 24}, TraceFlags: 1,
		},
		Start: 1000 * ms, FirstRead: 1001 * ms, FirstChunk: 1100 * ms, End: 1400 * ms,
		Status: 200, Streaming: true, Chunks: 3,
		Gaps:       assemble.Gaps{N: 2, P50: 50e6, P99: 200e6, Max: 200e6},
		GapValues:  []int64{50e6, 200e6},
		MajorFault: 60e6, SharedBy: 2, Retransmits: 1, SoftirqDelay: 2e6, RemoteFaults: 17,
	}
	r.Exclusive[stage.CPU] = 200e6
	r.Exclusive[stage.PageFault] = 80e6
	r.Exclusive[stage.SendBuffer] = 20e6
	r.Waker[stage.CPU] = 150e6
	r.Waker[stage.PageFault] = 80e6
	r.Exclusive[stage.Wait] = 90e6
	r.Exclusive[stage.Unattributed] = 10e6
	r.Plain[stage.SendBuffer] = 35e6
	r.Plain[stage.Retransmit] = 15e6
	return r
}

// unlinked is a request without context, of which little is known.
func unlinked() *assemble.Request {
	r := &assemble.Request{
		Key: key(2), PID: 11,
		Peer:  assemble.Peer{Family: 10, LocalAddr: [16]byte{15: 1}, RemoteAddr: [16]byte{15: 1}, LocalPort: 8080, RemotePort: 40001},
		Head:  httphead.Head{Method: "GET", Path: "/health", Proto: "1.0"},
		Start: 2000 * ms, FirstRead: 2000 * ms, FirstChunk: 2010 * ms, End: 2010 * ms,
		Status: 503, Chunks: 1, SharedBy: 1, SoftirqDelay: -1, RemoteFaults: -1,
		Missing:    []stage.Stage{stage.PageFault, stage.Qdisc},
		Incomplete: []string{assemble.IncompleteHead, assemble.IncompleteAborted},
	}
	r.Exclusive[stage.CPU] = 10e6
	return r
}

func TestSpansOfRequests(t *testing.T) {
	b := newBench(t)
	a, u, unsampled := streamed(), unlinked(), streamed()
	unsampled.Key, unsampled.Head.TraceFlags = key(3), 0
	b.Begin(a)
	b.Begin(u)
	b.Begin(unsampled)
	b.Occurrence(&assemble.Occurrence{
		Key: a.Key, PID: 20, TID: 22, Stage: stage.PageFault, Start: 1050 * ms, End: 1130 * ms, Duration: 80e6,
		Syscall: -1, Major: true, SharedBy: 3, Others: []assemble.Key{u.Key, unsampled.Key}, Waker: true,
	})
	b.Occurrence(&assemble.Occurrence{
		Key: a.Key, PID: 10, TID: 13, Stage: stage.Syscall, Start: 1200 * ms, End: 1203 * ms, Duration: 3e6, Stretch: 5e6, Syscall: 0, SharedBy: 1,
	})
	b.Occurrence(&assemble.Occurrence{
		Key: u.Key, Stage: stage.SendBuffer, Start: 2001 * ms, End: 2005 * ms, Duration: 4e6, Syscall: -1, SharedBy: 1,
	})
	b.Finish(u)
	b.Finish(a)
	b.Finish(unsampled)
	got := b.taken()

	path := filepath.Join("testdata", "spans.yaml")
	want, err := golden.ReadTraces(path)
	require.NoError(t, err)
	require.NoError(t, ptracetest.CompareTraces(want, got))
	assert.Zero(t, b.taken().SpanCount(), "taken once")
	assert.Empty(t, b.open)

	metadatatest.AssertEqualReceiverEbpfllmRequestsLinked(t, b.telemetry, []metricdata.DataPoint[int64]{
		{Value: 2, Attributes: attribute.NewSet(attribute.String("method", "traceparent"))},
		{Value: 1, Attributes: attribute.NewSet(attribute.String("method", "none"))},
	}, metricdatatest.IgnoreTimestamp())
}

// A stall that delayed several is told in the trace of each, and each telling
// names the others.
func TestASharedStallIsASpanInEachTraceThatLinksToTheOthers(t *testing.T) {
	for _, n := range []int{2, 3, assemble.MaxOthers + 1, assemble.MaxOthers + 10} {
		b := newBench(t)
		var requests []*assemble.Request
		for i := range n {
			r := unlinked()
			if i%2 == 0 {
				r = streamed()
				r.Head.TraceID[0] = byte(i)
			}
			r.Key = key(i)
			requests = append(requests, r)
			b.Begin(r)
		}
		others := min(n-1, assemble.MaxOthers)
		for i, r := range requests {
			o := &assemble.Occurrence{Key: r.Key, PID: r.PID, TID: 12, Stage: stage.Lock, Start: r.Start, End: r.Start + 60*ms, Duration: 60e6, Syscall: -1, SharedBy: n}
			for j := range others {
				o.Others = append(o.Others, requests[(i+1+j)%n].Key)
			}
			b.Occurrence(o)
		}
		for _, r := range requests {
			b.Finish(r)
		}
		traces := map[pcommon.TraceID]pcommon.SpanID{} // of the kernel.requests
		links := map[pcommon.TraceID]ptrace.Span{}
		for _, rs := range b.taken().ResourceSpans().All() {
			for _, s := range rs.ScopeSpans().At(0).Spans().All() {
				method, _ := s.Attributes().Get("ebpfllm.link.method")
				if s.Name() == requestSpan {
					traces[s.TraceID()] = s.SpanID()
					assert.NotEqual(t, assemble.LinkShared, method.Str())
					assert.Zero(t, s.Links().Len())
					continue
				}
				links[s.TraceID()] = s
				assert.Equal(t, assemble.LinkShared, method.Str())
			}
		}
		assert.Len(t, traces, n)
		assert.Len(t, links, n)
		for trace, s := range links {
			assert.Equal(t, others, s.Links().Len())
			assert.EqualValues(t, n-1-others, s.DroppedLinksCount())
			sharedBy, _ := s.Attributes().Get("ebpfllm.shared_by")
			assert.EqualValues(t, n, sharedBy.Int())
			linked := map[pcommon.TraceID]bool{}
			for _, l := range s.Links().All() {
				assert.Equal(t, traces[l.TraceID()], l.SpanID())
				linked[l.TraceID()] = true
			}
			assert.Len(t, linked, others, "each once")
			assert.NotContains(t, linked, trace, "not itself")
		}
	}
}

func spansByName(t ptrace.Traces) map[string]ptrace.Span {
	m := map[string]ptrace.Span{}
	for _, rs := range t.ResourceSpans().All() {
		for _, ss := range rs.ScopeSpans().All() {
			for _, s := range ss.Spans().All() {
				m[s.Name()] = s
			}
		}
	}
	return m
}

func TestStagesOfARequestSumToItsDuration(t *testing.T) {
	b := newBench(t)
	b.Begin(streamed())
	b.Finish(streamed())
	s := spansByName(b.taken())[requestSpan]
	sum := 0.0
	for name, v := range s.Attributes().All() {
		if len(name) > len("ebpfllm.stage.") && name[:len("ebpfllm.stage.")] == "ebpfllm.stage." {
			sum += v.Double()
		}
	}
	assert.InDelta(t, float64(s.EndTimestamp()-s.StartTimestamp())/1e9, sum, 1e-9)
}

// A mistake in the contract would be to send an occurrence with the request:
// the processor must hear of it while the request goes on.
func TestAnOccurrenceIsGivenOnBeforeItsRequestEnds(t *testing.T) {
	b := newBench(t)
	r := streamed()
	b.Begin(r)
	b.Occurrence(&assemble.Occurrence{Key: r.Key, Stage: stage.RunQueue, Start: 1010 * ms, End: 1020 * ms, Syscall: -1})
	early := spansByName(b.taken())
	require.Contains(t, early, "run_queue")
	b.Finish(r)
	late := spansByName(b.taken())
	require.Contains(t, late, requestSpan)
	assert.Equal(t, late[requestSpan].SpanID(), early["run_queue"].ParentSpanID())
	assert.Equal(t, late[requestSpan].TraceID(), early["run_queue"].TraceID())
}

func TestAnUnsampledRequestIsMeasuredAndCountedButGetsNoSpans(t *testing.T) {
	for _, emit := range []bool{false, true} {
		b := newBench(t)
		b.emitUnsampled = emit
		r := streamed()
		r.Head.TraceFlags = 0
		b.Begin(r)
		b.Occurrence(&assemble.Occurrence{Key: r.Key, Stage: stage.Lock, Start: 1010 * ms, End: 1020 * ms, Syscall: -1})
		b.Finish(r)
		spans := b.taken()
		if emit {
			assert.Equal(t, 2, spans.SpanCount())
			assert.Zero(t, spansByName(spans)[requestSpan].Flags())
		} else {
			assert.Zero(t, spans.SpanCount())
			metadatatest.AssertEqualReceiverEbpfllmRequestsUnsampled(t, b.telemetry,
				[]metricdata.DataPoint[int64]{{Value: 1}}, metricdatatest.IgnoreTimestamp())
		}
		assert.Equal(t, 1, b.metrics.collect().ResourceMetrics().Len(), "measured all the same")
	}
}

func TestAStepOfTheClockDoesNotTearARequestApart(t *testing.T) {
	b := newBench(t)
	r := streamed()
	b.Begin(r)
	b.offset -= clock.Offset(3600e9)
	b.Finish(r)
	s := spansByName(b.taken())[requestSpan]
	assert.Equal(t, pcommon.Timestamp(wallStart.Unix(r.Start)), s.StartTimestamp())
	assert.Equal(t, pcommon.Timestamp(wallStart.Unix(r.End)), s.EndTimestamp())
}

func TestOwnTracesDiffer(t *testing.T) {
	b := newBench(t)
	b.random = randomBytes
	seen := map[pcommon.TraceID]bool{}
	for i := range 100 {
		r := unlinked()
		r.Key = key(i)
		b.Begin(r)
		b.Finish(r)
	}
	for _, rs := range b.taken().ResourceSpans().All() {
		for _, s := range rs.ScopeSpans().At(0).Spans().All() {
			assert.Equal(t, ptrace.SpanKindServer, s.Kind())
			assert.True(t, s.ParentSpanID().IsEmpty())
			assert.False(t, s.SpanID().IsEmpty())
			seen[s.TraceID()] = true
		}
	}
	assert.Len(t, seen, 100)
}

func TestIDsAreNeverZero(t *testing.T) {
	b := newBench(t)
	n := 0
	b.random = func(id []byte) {
		clear(id)
		if n++; n > 3 {
			id[0] = 1
		}
	}
	b.Begin(unlinked())
	assert.False(t, b.open[key(2)].trace.IsEmpty())
}

func TestWhatIsNotKnownIsLeftOut(t *testing.T) {
	b := newBench(t)
	r := unlinked()
	r.Status, r.FirstChunk, r.Chunks = 0, 0, 0
	r.Head.Path = ""
	b.Begin(r)
	b.Finish(r)
	a := spansByName(b.taken())[requestSpan].Attributes()
	for _, name := range []string{
		"http.response.status_code", "ebpfllm.response.time_to_first_chunk", "ebpfllm.response.chunk.gap.p50", "url.path",
		"ebpfllm.stage.page_fault", "ebpfllm.page_fault.major", "ebpfllm.socket.qdisc", "gen_ai.operation.name", "ebpfllm.shared_by", "ebpfllm.tid",
		"ebpfllm.softirq.delay", "ebpfllm.numa.remote_faults",
	} {
		_, ok := a.Get(name)
		assert.False(t, ok, name)
	}
}

func TestALostBatchMarksTheRequestsItTouched(t *testing.T) {
	b := newBench(t)
	touched, other := streamed(), unlinked()
	b.Begin(touched)
	b.Begin(other)
	b.Occurrence(&assemble.Occurrence{Key: touched.Key, Stage: stage.Lock, Start: 1010 * ms, End: 1020 * ms, Syscall: -1})
	_, number := b.take()
	b.drop(number)
	b.Finish(touched)
	a := spansByName(b.taken())[requestSpan].Attributes()
	incomplete, _ := a.Get("ebpfllm.incomplete")
	reasons, _ := a.Get("ebpfllm.incomplete.reasons")
	assert.True(t, incomplete.Bool())
	assert.Equal(t, []any{"occurrences_lost"}, reasons.Slice().AsRaw())

	other.Incomplete = nil
	b.Finish(other)
	incomplete, _ = spansByName(b.taken())[requestSpan].Attributes().Get("ebpfllm.incomplete")
	assert.False(t, incomplete.Bool())
}

func TestARefusedRequestHasNoSpanAndNoMetric(t *testing.T) {
	b := newBench(t)
	r := streamed()
	b.Begin(r)
	r.Refused = assemble.RefusedPipelined
	b.Finish(r)
	assert.Zero(t, b.taken().SpanCount())
	assert.Zero(t, b.metrics.collect().ResourceMetrics().Len())
	assert.Empty(t, b.open)
}

// What has left names the request's span as its parent: without that span the
// processor would hold the trace as unfinished.
func TestARefusedRequestWhoseOccurrencesHaveLeftGetsASpanThatClaimsNothing(t *testing.T) {
	for name, r := range map[string]*assemble.Request{"linked": streamed(), "unlinked": unlinked()} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.Begin(r)
			for _, end := range []uint64{20, 90, 40} { // the second ends last
				b.Occurrence(&assemble.Occurrence{Key: r.Key, Stage: stage.Lock, Start: r.Start + 10*ms, End: r.Start + end*ms, Syscall: -1})
			}
			early := spansByName(b.taken())["lock"]
			r.Refused = assemble.RefusedPipelined
			b.Finish(r)
			spans := b.taken()
			require.Equal(t, 1, spans.SpanCount())
			s := spansByName(spans)[requestSpan]
			assert.Equal(t, early.TraceID(), s.TraceID())
			assert.Equal(t, early.ParentSpanID(), s.SpanID())
			assert.Equal(t, r.Head.Linked(), !s.ParentSpanID().IsEmpty())
			assert.Equal(t, pcommon.Timestamp(wallStart.Unix(r.Start)), s.StartTimestamp())
			assert.Equal(t, pcommon.Timestamp(wallStart.Unix(r.Start+90*ms)), s.EndTimestamp())

			a := s.Attributes().AsRaw()
			assert.Equal(t, true, a["ebpfllm.incomplete"])
			assert.Contains(t, a["ebpfllm.incomplete.reasons"], assemble.RefusedPipelined)
			assert.Equal(t, r.Head.Path, a["url.path"])
			var all []any
			for _, s := range stage.All() {
				all = append(all, s.String())
			}
			assert.Equal(t, all, a["ebpfllm.stages.unavailable"])
			for attribute := range a {
				for _, unknown := range []string{"ebpfllm.stage.", "ebpfllm.socket.", "ebpfllm.page_fault.", "ebpfllm.response."} {
					assert.False(t, strings.HasPrefix(attribute, unknown), attribute)
				}
			}
			assert.Zero(t, b.metrics.collect().ResourceMetrics().Len())
			assert.Empty(t, b.open)
		})
	}
}

func TestARefusedRequestOfWhichNoSpanIsMadeStaysWithoutOne(t *testing.T) {
	b := newBench(t)
	r := streamed()
	r.Head.TraceFlags = 0 // not sampled
	b.Begin(r)
	b.Occurrence(&assemble.Occurrence{Key: r.Key, Stage: stage.Lock, Start: 1010 * ms, End: 1020 * ms, Syscall: -1})
	r.Refused = assemble.RefusedUpgraded
	b.Finish(r)
	assert.Zero(t, b.taken().SpanCount())
}

func TestAnOccurrenceOfNoRequestIsCounted(t *testing.T) {
	b := newBench(t)
	b.Occurrence(&assemble.Occurrence{Key: key(7), Stage: stage.Lock})
	b.Finish(unlinked()) // was never begun
	assert.Zero(t, b.taken().SpanCount())
	assert.Equal(t, uint64(1), b.orphan)
}

func TestWithoutATracesPipelineNoSpansAreMade(t *testing.T) {
	b := newBench(t)
	b.spans = false
	b.Begin(streamed())
	b.Occurrence(&assemble.Occurrence{Key: key(1), Stage: stage.Lock, Start: 1010 * ms, End: 1020 * ms})
	b.Finish(streamed())
	assert.Zero(t, b.taken().SpanCount())
	assert.Equal(t, 1, b.metrics.collect().ResourceMetrics().Len())
}

func TestABatchIsBounded(t *testing.T) {
	b := newBench(t)
	batches := 0
	b.full = func() {
		batches++
		assert.Equal(t, maxBatch, b.taken().SpanCount())
	}
	b.Begin(streamed())
	for range 2*maxBatch + 1 {
		b.Occurrence(&assemble.Occurrence{Key: key(1), Stage: stage.Lock, Start: 1010 * ms, End: 1020 * ms, Syscall: -1})
	}
	assert.Equal(t, 2, batches)
	assert.Equal(t, 1, b.taken().SpanCount())
}

func BenchmarkRecorder(b *testing.B) {
	builder, err := metadata.NewTelemetryBuilder(componenttest.NewNopTelemetrySettings())
	require.NoError(b, err)
	p := &process{Process: target.Process{PID: 10}}
	r := newRecorder(func(uint32) *process { return p }, func() clock.Offset { return wallStart }, builder)
	r.spans, r.metrics = true, newMetricStore(func() uint64 { return 0 })
	r.full = func() { r.take() }
	req := streamed()
	occ := &assemble.Occurrence{Key: req.Key, Stage: stage.PageFault, Start: 1050 * ms, End: 1130 * ms, Syscall: 0}
	b.ReportAllocs()
	for b.Loop() {
		r.Begin(req)
		r.Occurrence(occ)
		r.Finish(req)
	}
}
