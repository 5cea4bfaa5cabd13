package loadtest

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/pcommon"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// What the distribution promises on real kernel events: of 4,000 normal and 200
// delayed requests, 190 delayed ones are kept with the right stage to blame and
// at most one normal one in a hundred; and what every kept trace must be.
func TestAcceptance(t *testing.T) {
	if testing.Short() {
		t.Skip("takes minutes; -short is set")
	}
	if _, err := cpus(); err != nil {
		t.Skip(err)
	}
	path := os.Getenv("EBPFLLM_COLLECTOR")
	if path == "" {
		path = "../../dist/otelcol-ebpfllm"
	}
	if _, err := os.Stat(path); err != nil {
		t.Skipf("needs the distribution: run `make build` first (%v)", err)
	}
	out := t.TempDir()
	report, err := Run(t.Context(), Options{
		Collector: path, Server: LLMServer, Out: out, WarmUp: 500, Normal: 3500, Spikes: 200,
		Delay: 100 * time.Millisecond, Log: t.Output(),
	})
	require.NoError(t, err)
	defer func() {
		if t.Failed() {
			for _, k := range report.Kept {
				if !k.Right && !k.HostStall {
					drawKept(t.Output(), k)
				}
			}
			report.Kept = nil
		}
		report.Kept = slices.DeleteFunc(report.Kept, func(k Kept) bool { return k.Right || k.HostStall })
		report.Write(t.Output())
	}()

	assert.GreaterOrEqual(t, report.Normal(), 4000)
	assert.Equal(t, 200, report.Spikes)
	assert.GreaterOrEqual(t, report.RightStage, 190)
	assert.LessOrEqual(t, report.KeptNormal, report.Normal()/100)
	assert.Zero(t, report.Strangers)
	assert.Empty(t, report.Losses)
	for _, k := range report.Kept {
		if k.Request != nil && !k.Request.Disturbed {
			checkKept(t, k)
		}
	}
}

// checkKept holds one kept trace to what is promised of all.
func checkKept(t *testing.T, k Kept) {
	t.Helper()
	byID := map[pcommon.SpanID]Span{}
	application := false
	for _, s := range k.Trace.Spans {
		byID[s.SpanID()] = s
		application = application || !s.Kernel
	}
	request, ok := k.Trace.Request()
	if !assert.True(t, ok && application, "trace %s does not hold both application and kernel spans", k.Trace.ID) {
		return
	}
	for _, s := range k.Trace.Spans {
		if s.ParentSpanID() == k.Request.SpanID {
			assert.False(t, s.Kernel, "trace %s: %s stands beside the application's span, not under it", k.Trace.ID, s.Name())
			continue // the client's span, which nobody exported
		}
		_, ok := byID[s.ParentSpanID()]
		assert.True(t, ok, "trace %s: the parent of %s is missing", k.Trace.ID, s.Name())
	}

	var sum time.Duration
	stages := request.Stages()
	for _, d := range stages {
		sum += d
	}
	assert.InDelta(t, request.Duration().Seconds(), sum.Seconds(), 1e-6,
		"trace %s: the stages do not sum to the request", k.Trace.ID)

	var last Span
	for i, s := range k.Trace.Spans { // by start
		if !s.Kernel || s.Name() == request.Name() {
			continue
		}
		if last != (Span{}) {
			assert.GreaterOrEqual(t, s.StartTimestamp(), last.EndTimestamp(), "trace %s: %s and %s (%d) overlap", k.Trace.ID, last.Name(), s.Name(), i)
		}
		last = s
	}

	if k.Request.Fault != stage.Unknown {
		unexplained := stages[stage.Unattributed] + stages[stage.Wait]
		assert.LessOrEqual(t, unexplained, k.Request.Taken/10,
			"trace %s: %v of a delay of %v by %s are not explained", k.Trace.ID, unexplained, k.Request.Taken, k.Request.Fault)
	}
}
