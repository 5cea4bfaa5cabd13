package spikesamplingprocessor

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// arrival is a batch and when it comes.
type arrival struct {
	at time.Duration
	s  service
}

const (
	server   = ptrace.SpanKindServer
	client   = ptrace.SpanKindClient
	internal = ptrace.SpanKindInternal
)

func TestATraceIsDecidedWhenItIsComplete(t *testing.T) {
	ms := time.Millisecond
	tests := []struct {
		name string
		in   []arrival
		want time.Duration // after the first arrival
	}{
		{
			"30 s after the last span where no local root comes",
			[]arrival{
				{0, app("a", span{id: 2, parent: 1, kind: client, to: 100 * ms})},
				{10 * time.Second, app("a", span{id: 3, parent: 1, kind: internal, to: 100 * ms})},
			},
			40 * time.Second,
		},
		{
			"6 s after a SERVER span whose parent is elsewhere",
			[]arrival{{0, app("a", span{id: 2, parent: 1, kind: server, to: 100 * ms})}},
			6 * time.Second,
		},
		{
			"6 s after a span without a parent",
			[]arrival{{0, app("a", span{id: 2, kind: internal, to: 100 * ms})}},
			6 * time.Second,
		},
		{
			"6 s after the last of several local roots",
			[]arrival{
				{0, app("a", span{id: 2, parent: 1, kind: server, to: 100 * ms})},
				{4 * time.Second, app("b", span{id: 3, parent: 9, kind: server, to: 100 * ms})},
				{5 * time.Second, app("b", span{id: 4, parent: 3, kind: internal, to: 100 * ms})},
			},
			10 * time.Second,
		},
		{
			"by the wait where the SERVER span's parent is here, but that one's is not",
			[]arrival{
				{0, app("a", span{id: 1, parent: 7, kind: client, to: 100 * ms})},
				{0, app("b", span{id: 2, parent: 1, kind: server, to: 100 * ms})},
			},
			30 * time.Second,
		},
		{
			"6 s where it says that its parent is remote, buffered or not",
			[]arrival{
				{0, app("a", span{id: 1, parent: 7, kind: client, to: 100 * ms})},
				{0, app("b", span{id: 2, parent: 1, kind: server, to: 100 * ms, remote: true})},
			},
			6 * time.Second,
		},
		{
			"0.8 s after the receiver's own root",
			[]arrival{{0, kernel("a", request(2, 0, 0, 100*ms, nil))}},
			800 * ms,
		},
		{
			"6 s after a kernel.request below a wire's parent: the application's spans are to come",
			[]arrival{{0, kernel("a", request(2, 1, 0, 100*ms, nil))}},
			6 * time.Second,
		},
		{
			"an occurrence without its request keeps it open",
			[]arrival{
				{0, kernel("a", occurrence(3, 2, "lock", 0, 10*ms))},
				{5 * time.Second, app("a", span{id: 5, parent: 1, kind: server, to: 100 * ms})},
				{3 * time.Minute, kernel("a", request(2, 1, 0, 3*time.Minute, nil))},
			},
			3*time.Minute + 6*time.Second,
		},
		{
			"but not for ever",
			[]arrival{{0, kernel("a", occurrence(3, 2, "lock", 0, 10*ms))}},
			15 * time.Minute,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := newHarness(t, nil)
			var at time.Duration
			for _, a := range tt.in {
				h.pass(a.at - at)
				at = a.at
				h.send(makeTraces(1, a.s))
			}
			h.pass(tt.want - at - tickInterval)
			require.Len(t, h.p.buffer.traces, 1, "still open")
			h.pass(2 * tickInterval)
			assert.Empty(t, h.p.buffer.traces, "decided")
			assert.Zero(t, h.p.buffer.bytes, "and all its memory given back")
			assert.Empty(t, h.p.buffer.scopes)
			assert.Empty(t, h.p.buffer.resources)
		})
	}
}

func TestAnEntrySpanOfAMeasuredServiceAwaitsItsKernelRequest(t *testing.T) {
	ms := time.Millisecond
	entry := span{id: 2, parent: 1, kind: server, to: 100 * ms}
	both := func(kernelName string) []service {
		return []service{kernel(kernelName, request(8, 7, 0, 100*ms, nil)), app("a", span{id: 9, parent: 7, kind: server, to: 100 * ms})}
	}
	tests := []struct {
		name   string
		before []service // another trace, decided before
		idle   time.Duration
		in     []arrival
		want   time.Duration // after the first arrival
	}{
		{
			"30 s after its last span where the service is known by its name",
			[]service{kernel("a", request(8, 0, 0, 100*ms, nil))},
			0,
			[]arrival{{0, app("a", entry)}, {4 * time.Second, app("a", span{id: 3, parent: 2, to: 100 * ms})}},
			34 * time.Second,
		},
		{
			"or by an entry span with the kernel.request's parent",
			both("python3"),
			0,
			[]arrival{{0, app("a", entry)}},
			30 * time.Second,
		},
		{
			"6 s after the kernel.request when that comes",
			both("python3"),
			0,
			[]arrival{{0, app("a", entry)}, {14 * time.Second, kernel("python3", request(4, 1, 0, 14*time.Second, nil))}},
			20 * time.Second,
		},
		{
			"as ever where it is there",
			both("a"),
			0,
			[]arrival{{0, kernel("a", request(4, 1, 0, 100*ms, nil))}, {time.Second, app("a", entry)}},
			7 * time.Second,
		},
		{
			"another request's is not its own",
			both("a"),
			0,
			[]arrival{{0, app("a", entry)}, {0, kernel("b", request(4, 5, 0, 100*ms, nil))}},
			30 * time.Second,
		},
		{
			"where its caller's span is buffered it awaits it too",
			both("a"),
			0,
			[]arrival{{0, app("client", span{id: 1, kind: client, to: 100 * ms})}, {0, app("a", entry)}},
			30 * time.Second,
		},
		{
			"a SERVER span below another of its process is no entry span",
			both("a"),
			0,
			[]arrival{
				{0, kernel("a", request(4, 1, 0, 100*ms, nil))},
				{0, app("a", entry, span{id: 3, parent: 2, kind: server, to: 100 * ms})},
			},
			6 * time.Second,
		},
		{
			"nor is one without a parent: the kernel.request is in another trace",
			both("a"),
			0,
			[]arrival{{0, app("a", span{id: 2, kind: server, to: 100 * ms})}},
			6 * time.Second,
		},
		{
			"6 s where the receiver measures another service",
			both("a"),
			0,
			[]arrival{{0, app("b", entry)}},
			6 * time.Second,
		},
		{
			"6 s where the receiver has not measured it for the baseline's window",
			both("a"),
			defaultConfig().Baseline.Window + 10*time.Second,
			[]arrival{{0, app("a", entry)}},
			6 * time.Second,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := newHarness(t, nil)
			h.send(makeTraces(2, tt.before...))
			h.pass(10*time.Second + tt.idle)
			require.Empty(t, h.p.buffer.traces)
			var at time.Duration
			for _, a := range tt.in {
				h.pass(a.at - at)
				at = a.at
				h.send(makeTraces(1, a.s))
			}
			h.pass(tt.want - at - tickInterval)
			require.Len(t, h.p.buffer.traces, 1, "still open")
			h.pass(2 * tickInterval)
			assert.Empty(t, h.p.buffer.traces, "decided")
			assert.Zero(t, h.p.buffer.bytes)
		})
	}
}

func TestTheServicesRememberedAsMeasuredAreBounded(t *testing.T) {
	o := newOperations(100)
	for i := range 1000 {
		o.measure(fmt.Sprint("service ", i), int64(i))
	}
	assert.Len(t, o.measured, 100)
	assert.True(t, o.measures("service 99"))
	assert.False(t, o.measures("service 100"), "beyond the bound: as if not measured")
	o.measure("service 7", 2000)
	o.expire(1500)
	assert.Equal(t, map[string]int64{"service 7": 2000}, o.measured)
}

func TestATraceThatNeverStopsIsDecidedAtMaxTraceDuration(t *testing.T) {
	h := newHarness(t, func(c *Config) { c.MaxTraceDuration = time.Minute })
	for i := range 7 {
		h.send(makeTraces(1, app("a", span{id: uint64(2 + i), parent: 1, kind: client, to: time.Millisecond})))
		h.pass(9 * time.Second)
	}
	assert.Empty(t, h.p.buffer.traces)
	h.p.report()
	assert.Equal(t, map[string]int64{earlyMaxDuration: 1}, h.sum("traces_decided_early", "reason"))
}

func TestATraceWithEverNewSpikesIsDecidedAllTheSame(t *testing.T) {
	h := newHarness(t, func(c *Config) { c.MaxTraceDuration = time.Minute })
	for i := range 64 {
		h.send(makeTraces(1, app("a", span{id: uint64(2 + i), parent: 1, kind: client, to: 5 * time.Second})))
		h.pass(time.Second)
	}
	assert.Empty(t, h.p.buffer.traces)
	assert.Len(t, h.kept(), 1)
}
