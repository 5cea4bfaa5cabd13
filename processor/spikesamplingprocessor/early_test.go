package spikesamplingprocessor

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer/consumertest"
)

// A next component that takes all it gets is not kept waiting for a tick by a
// buffer that is full of what it would take.
func TestAFullBufferIsHandedOnBeforeTheNextTick(t *testing.T) {
	cfg := defaultConfig()
	cfg.MaxBufferMiB = 1
	cfg.DryRun = true // all are kept
	next := new(consumertest.TracesSink)
	p := newTestProcessor(t, cfg, next)
	p.ticks = make(chan time.Time) // never
	require.NoError(t, p.Start(t.Context(), componenttest.NewNopHost()))
	t.Cleanup(func() { require.NoError(t, p.Shutdown(context.Background())) })
	const traces = 5000 // about seven buffers
	for i := range uint64(traces) {
		require.Eventually(t, func() bool {
			return p.ConsumeTraces(t.Context(), makeTraces(i, app("a", big(2, 1000)))) == nil
		}, 10*time.Second, time.Millisecond, "trace %d", i)
	}
	assert.Greater(t, next.SpanCount(), traces/2)
}
