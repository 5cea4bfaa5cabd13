package loadtest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// keptTrace makes a trace of an application span with a kernel.request under it,
// which spent the given milliseconds in one stage.
func keptTrace(id byte, in stage.Stage, ms int, blamed string) ptrace.Traces {
	data := ptrace.NewTraces()
	add := func(scope string) ptrace.Span {
		resource := data.ResourceSpans().AppendEmpty()
		resource.Resource().Attributes().PutStr("service.name", "llmserver")
		spans := resource.ScopeSpans().AppendEmpty()
		spans.Scope().SetName(scope)
		span := spans.Spans().AppendEmpty()
		span.SetTraceID(pcommon.TraceID{id})
		span.SetStartTimestamp(pcommon.Timestamp(int64(id) * 1e9))
		span.SetEndTimestamp(pcommon.Timestamp(int64(id)*1e9 + int64(ms)*1e6))
		return span
	}
	entry := add("otelhttp")
	entry.SetName("POST /v1/chat/completions")
	entry.SetSpanID(pcommon.SpanID{1})
	entry.SetParentSpanID(pcommon.SpanID{99})
	kernel := add(receiverScope)
	kernel.SetName("kernel.request")
	kernel.SetSpanID(pcommon.SpanID{2})
	kernel.SetParentSpanID(pcommon.SpanID{1})
	kernel.Attributes().PutDouble("ebpfllm.stage."+in.String(), float64(ms)/1000)
	kernel.Attributes().PutStr("spike.stage", blamed)
	return data
}

func writeTraces(t *testing.T, traces ...ptrace.Traces) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "spikes.jsonl")
	file, err := os.Create(path)
	require.NoError(t, err)
	defer file.Close()
	for _, data := range traces {
		line, err := (&ptrace.JSONMarshaler{}).MarshalTraces(data)
		require.NoError(t, err)
		_, err = file.Write(append(line, '\n'))
		require.NoError(t, err)
	}
	return path
}

func TestJudge(t *testing.T) {
	request := func(id byte, fault stage.Stage) *Request {
		return &Request{sent: sent{TraceID: pcommon.TraceID{id}}, Fault: fault}
	}
	traces, err := readTraces(writeTraces(t,
		keptTrace(5, stage.Lock, 60, "lock"),
		keptTrace(1, stage.Lock, 60, "lock"),
		keptTrace(2, stage.PageFault, 60, "block_io"),
		keptTrace(3, stage.RunQueue, 40, "run_queue"),
		keptTrace(4, stage.CPU, 300, "cpu"),
	))
	require.NoError(t, err)
	r := judge([]*Request{
		request(1, stage.Lock), request(2, stage.PageFault), request(6, stage.Stopped),
		request(3, stage.Unknown), request(4, stage.Unknown), request(7, stage.Unknown),
	}, traces)

	assert.Equal(t, 6, r.Requests)
	assert.Equal(t, 3, r.Spikes)
	assert.Equal(t, 2, r.KeptSpikes)
	assert.Equal(t, 1, r.RightStage)
	assert.Equal(t, 1, r.HostStalls, "a normal request with 40 ms in the run queue was stalled by the host")
	assert.Equal(t, 1, r.KeptNormal, "time on the CPU is no stall")
	assert.Equal(t, 1, r.Strangers)

	var text strings.Builder
	r.Write(&text)
	assert.True(t, strings.HasSuffix(text.String(), "\nrequests=6 spikes=3 kept_spikes=2 right_stage=1 kept_normal=1\n"))
	assert.Contains(t, text.String(), "1 blamed on block_io")
}

func TestReportIsGoodOnlyWithinItsBounds(t *testing.T) {
	for _, c := range []struct {
		name   string
		report Report
		good   bool
	}{
		{"all right", Report{Requests: 430, Spikes: 30, RightStage: 30}, true},
		{"nine in ten", Report{Requests: 430, Spikes: 30, RightStage: 27, KeptNormal: 4}, true},
		{"too few right", Report{Requests: 430, Spikes: 30, RightStage: 26}, false},
		{"too many normal", Report{Requests: 430, Spikes: 30, RightStage: 30, KeptNormal: 5}, false},
		{"no spikes", Report{Requests: 430}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			assert.Equal(t, c.good, c.report.Err() == nil, "%v", c.report.Err())
		})
	}
}

func TestDrawIsATree(t *testing.T) {
	data := keptTrace(1, stage.Lock, 60, "lock")
	kernel := data.ResourceSpans().At(1).ScopeSpans().At(0).Spans()
	for i := range 5 {
		span := kernel.AppendEmpty()
		span.SetName("lock")
		span.SetTraceID(pcommon.TraceID{1})
		span.SetSpanID(pcommon.SpanID{3, byte(i)})
		span.SetParentSpanID(pcommon.SpanID{2})
		span.SetEndTimestamp(pcommon.Timestamp(12 * time.Millisecond))
		span.Attributes().PutStr("ebpfllm.syscall.name", "flock")
	}
	// A span that is its own parent must not draw forever.
	loop := kernel.AppendEmpty()
	loop.SetTraceID(pcommon.TraceID{1})
	loop.SetSpanID(pcommon.SpanID{4})
	loop.SetParentSpanID(pcommon.SpanID{4})

	traces, err := readTraces(writeTraces(t, data))
	require.NoError(t, err)
	var text strings.Builder
	traces[0].draw(&text)
	assert.Equal(t, `    POST /v1/chat/completions                   60.0 ms  llmserver
      kernel.request                            60.0 ms  kernel: lock 60.0 ms
        lock                                    12.0 ms  kernel: in flock
        lock                                    12.0 ms  kernel: in flock
        lock                                    12.0 ms  kernel: in flock
        … 2 more lock                           24.0 ms
`, text.String())
}

func TestReadTracesNamesTheBadLine(t *testing.T) {
	path := writeTraces(t, keptTrace(1, stage.Lock, 60, "lock"))
	file, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = file.WriteString("{\n")
	require.NoError(t, err)
	require.NoError(t, file.Close())
	_, err = readTraces(path)
	assert.ErrorContains(t, err, "line 2")
}
