package spikesamplingprocessor

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/extension/xextension/storage"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

func failed(id uint64) span {
	return span{id: id, kind: server, to: 1, status: ptrace.StatusCodeError}
}

// shutDownStuck shuts down a processor whose next component does not answer.
func shutDownStuck(h *harness, next *stuck) error {
	<-next.entered
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return h.p.Shutdown(ctx)
}

// A shutdown that is cut short loses no more than a kill does.
func TestWhatAShutdownCannotSendTheNextStartSends(t *testing.T) {
	dir := t.TempDir()
	keep := func(c *Config) { withStorage(c); c.Policies = []PolicyConfig{keepErrs} }
	for n := range uint64(3) { // the later ones have what the earlier ones left in hand
		next := &stuck{entered: make(chan struct{}, 100), letGo: make(chan struct{})}
		h := newHarnessOn(t, keep, newHost(t, dir), next)
		h.blocks = true
		h.send(makeTraces(2*n, app("a", failed(2))))
		h.pass(time.Minute)
		h.send(makeTraces(2*n+1, app("a", failed(2)))) // decided at the shutdown
		require.ErrorContains(t, shutDownStuck(h, next), "those in the storage are sent at the next start")
		assert.Empty(t, h.sum("spans_dropped", "reason"), "they are not lost")
		assert.Zero(t, h.p.buffer.bytes)
	}
	h := newHarnessOn(t, keep, newHost(t, dir))
	require.NoError(t, h.p.Shutdown(context.Background()))
	assert.Equal(t, 6, h.sink.SpanCount(), "each of them once")
	assert.Len(t, h.kept(), 6)
	assert.Empty(t, h.sum("traces_lost_at_restart", "reason"))
	again := newHarnessOn(t, keep, newHost(t, dir))
	require.NoError(t, again.p.Shutdown(context.Background()))
	assert.Zero(t, again.sink.SpanCount())
}

func TestWithoutAStorageWhatAShutdownCannotSendIsCountedAsLost(t *testing.T) {
	next := &stuck{entered: make(chan struct{}, 100), letGo: make(chan struct{})}
	h := newHarnessOn(t, func(c *Config) { c.Policies = []PolicyConfig{keepErrs} }, componenttest.NewNopHost(), next)
	h.blocks = true
	h.send(makeTraces(1, app("a", failed(2))), makeTraces(2, app("a", failed(2))))
	h.pass(time.Minute)
	require.ErrorContains(t, shutDownStuck(h, next), "were lost at shutdown")
	assert.Equal(t, map[string]int64{dropDownstream: 2}, h.sum("spans_dropped", "reason"))
}

// full takes so many batches more.
type full struct {
	storage.Client
	room int
}

func (f *full) Batch(ctx context.Context, ops ...*storage.Operation) error {
	if f.room--; f.room < 0 {
		return errors.New("full")
	}
	return f.Client.Batch(ctx, ops...)
}

// Wherever the writing breaks off, each trace is among those that the next process
// sends or among those that it says were lost.
func TestKeptTracesAreCountedAsUndecidedUntilTheyAreWritten(t *testing.T) {
	for room := range 4 {
		h := newHarnessOn(t, func(c *Config) { withStorage(c); c.Policies = []PolicyConfig{keepErrs} }, newHost(t, t.TempDir()))
		const traces = 10
		for i := range uint64(traces) {
			s := big(2, 1<<20)
			s.status = ptrace.StatusCodeError
			h.send(makeTraces(i, app("a", s)))
		}
		h.pass(tickInterval)
		require.Equal(t, traces, h.p.memory.undecided.Traces)
		client := h.p.memory.client
		h.p.memory.client = &full{Client: client, room: room}
		h.p.mu.Lock()
		for h.p.buffer.first != nil {
			h.p.decide(h.p.buffer.first, "", h.p.clock())
		}
		out := h.p.outbox
		h.p.outbox = nil
		h.p.mu.Unlock()
		require.Len(t, out, traces)
		h.p.record(out)
		h.p.memory.client = client
		written := 0
		for _, k := range out {
			if k.written {
				written++
			}
		}

		told := &memory{client: client}
		var count undecided
		var kept keptBatches
		_, err := told.get(t.Context(), keyUndecided, &count)
		require.NoError(t, err)
		_, err = told.get(t.Context(), keyKept, &kept)
		require.NoError(t, err)
		there := 0
		for i := kept.First; i < kept.Next; i++ {
			data, err := client.Get(t.Context(), keptKey(i))
			require.NoError(t, err)
			td, err := (&ptrace.ProtoUnmarshaler{}).UnmarshalTraces(data)
			require.NoError(t, err)
			there += td.SpanCount()
		}
		assert.Equal(t, room, kept.Next)
		assert.Equal(t, there, written)
		assert.Equal(t, traces, count.Traces+there, "after %d batches: %d lost, %d kept", room, count.Traces, there)
		assert.Equal(t, count.Traces, count.Spans)
	}
}

// slow takes its time.
type slow struct{ consumertest.TracesSink }

func (s *slow) ConsumeTraces(ctx context.Context, td ptrace.Traces) error {
	time.Sleep(time.Millisecond)
	return s.TracesSink.ConsumeTraces(ctx, td)
}

func TestKeptTracesArriveOnceInOrderAndLeaveNothingInTheStorage(t *testing.T) {
	on := newHost(t, t.TempDir())
	next := new(slow)
	h := newHarnessOn(t, func(c *Config) { withStorage(c); c.Policies = []PolicyConfig{keepErrs} }, on, next)
	h.blocks = true
	var now atomic.Int64
	h.p.now = func() time.Time { return epoch.Add(time.Duration(now.Load())) }
	const traces = 300
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for i := range uint64(traces) {
			assert.NoError(t, h.p.ConsumeTraces(context.Background(), makeTraces(i, app("a", failed(2)))))
			now.Add(tickInterval.Nanoseconds())
		}
	}()
	for range 3 * traces {
		h.p.tick()
	}
	<-sent
	require.NoError(t, h.p.Shutdown(context.Background()))
	var got, want []pcommon.TraceID
	for _, td := range next.AllTraces() {
		got = append(got, td.ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(0).TraceID())
	}
	for i := range uint64(traces) {
		want = append(want, traceID(i))
	}
	assert.Equal(t, want, got)
	assert.Zero(t, h.p.outboxBytes)
	assert.Zero(t, h.p.buffer.bytes)
	m, err := openMemory(t.Context(), on, &storageID, h.p.id)
	require.NoError(t, err)
	var kept keptBatches
	found, err := m.get(t.Context(), keyKept, &kept)
	require.NoError(t, err)
	assert.False(t, found)
	for i := range traces {
		data, err := m.client.Get(t.Context(), keptKey(i))
		require.NoError(t, err)
		assert.Nil(t, data, i)
	}
	require.NoError(t, m.close(context.Background()))
}

// What the storage did not take is counted as what a crash would lose until the
// next component has it, and not after that.
func TestKeptTracesThatCouldNotBeWrittenAreCountedUntilTheyAreSent(t *testing.T) {
	on := newHost(t, t.TempDir())
	next := &stuck{entered: make(chan struct{}, 100), letGo: make(chan struct{})}
	h := newHarnessOn(t, func(c *Config) { withStorage(c); c.Policies = []PolicyConfig{keepErrs} }, on, next)
	h.blocks = true
	const traces = 5
	for i := range uint64(traces) {
		h.send(makeTraces(i, app("a", failed(2))))
	}
	client := h.p.memory.client
	h.p.memory.client = &full{Client: client}
	h.pass(20 * time.Second) // decided, and not written
	<-next.entered
	h.p.memory.client = client // there is room again
	h.pass(tickInterval)
	told := func() (count undecided) {
		_, err := (&memory{client: client}).get(context.Background(), keyUndecided, &count)
		require.NoError(t, err)
		return count
	}
	assert.Equal(t, traces, told().Traces)
	assert.Equal(t, traces, told().Spans)
	close(next.letGo)
	require.NoError(t, h.p.Shutdown(context.Background())) // no tick sees them sent
	assert.Equal(t, traces, next.SpanCount())
	again := newHarnessOn(t, withStorage, on)
	assert.Empty(t, again.sum("traces_lost_at_restart", "reason"), "they were sent")
	require.NoError(t, again.p.Shutdown(context.Background()))
}
