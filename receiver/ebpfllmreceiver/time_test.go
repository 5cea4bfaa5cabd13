//go:build linux && amd64

package ebpfllmreceiver

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/receiver/receivertest"
	"go.uber.org/zap/zaptest"

	"github.com/ebpfllm/ebpfllm/internal/clock"
	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver/internal/metadata"
)

// The wall clock is stepped while a request is in flight, back, and forward as after a night's sleep, through which the
// kernel's monotonic clock stands still. The request stays as long as it was and where it began; the next ones are at the
// new time at once. The real receiver on the real kernel; only the wall clock that it reads is not the machine's, of
// which others live.
func TestRealStepOfTheWallClock(t *testing.T) {
	requireRoot(t)
	addr, pid := startServer(t)
	system := clock.System
	t.Cleanup(func() { clock.System = system })
	for _, by := range []time.Duration{-time.Hour, 8 * time.Hour} {
		t.Run(fmt.Sprint(by), func(t *testing.T) {
			var shift atomic.Int64
			clock.System.Wall = func() (int64, error) {
				now, err := system.Wall()
				return now + shift.Load(), err
			}
			set := receivertest.NewNopSettings(metadata.Type)
			set.Logger = zaptest.NewLogger(t)
			cfg := defaults()
			cfg.Targets = []TargetConfig{{PID: pid}}
			traces := &consumertest.TracesSink{}
			r, err := NewFactory().CreateTraces(t.Context(), set, cfg, traces)
			require.NoError(t, err)
			require.NoError(t, r.Start(t.Context(), componenttest.NewNopHost()))
			defer func() { require.NoError(t, r.Shutdown(context.Background())) }()

			begin := time.Now()
			// an answer of four chunks, 10 ms apart: it begins to come at once, and the step is in its midst
			step := time.AfterFunc(20*time.Millisecond, func() { shift.Store(int64(by)) })
			defer step.Stop()
			request(t, addr, "/v1/chat/completions", "")
			require.NotZero(t, shift.Load(), "the request was over before the step")
			took := time.Since(begin)
			<-time.After(100 * time.Millisecond) // a tick
			after := time.Now().Add(by)
			request(t, addr, "/v1/chat/completions", "")
			waitFor(t, func() bool { return len(kernelRequests(traces.AllTraces(), pid)) == 2 })
			spans := kernelRequests(traces.AllTraces(), pid)
			for _, s := range spans {
				duration := s.EndTimestamp().AsTime().Sub(s.StartTimestamp().AsTime())
				assert.Greater(t, duration, 25*time.Millisecond)
				assert.Less(t, duration, took+time.Second, "a step is no time that a request took")
			}
			const slack = 50 * time.Millisecond // what its head may have waited to be read from the ring
			start := spans[0].StartTimestamp().AsTime()
			// whether its head was read before the step or after it, it is at one of the two times
			assert.True(t, start.Sub(begin).Abs() < slack || start.Sub(begin.Add(by)).Abs() < slack, "%v, began %v", start, begin)
			start = spans[1].StartTimestamp().AsTime()
			assert.Less(t, start.Sub(after).Abs(), time.Second, "the step is followed at once: %v, began %v", start, after)
		})
	}
}

// In a time namespace of its own the collector's clocks are not those by which the kernel measures: it does not start.
func TestRealCollectorInATimeNamespaceIsRefused(t *testing.T) {
	if os.Getenv("EBPFLLM_TEST_TIME_NAMESPACE") != "" {
		cfg := defaults()
		cfg.Targets = []TargetConfig{{PID: os.Getpid()}}
		r, err := NewFactory().CreateTraces(t.Context(), receivertest.NewNopSettings(metadata.Type), cfg, consumertest.NewNop())
		require.NoError(t, err)
		require.ErrorContains(t, r.Start(t.Context(), componenttest.NewNopHost()), "time namespace of its own")
		return
	}
	requireRoot(t)
	unshare, err := exec.LookPath("unshare")
	if err != nil {
		t.Skip("needs util-linux: ", err)
	}
	if _, err := os.Stat("/proc/self/ns/time"); err != nil {
		t.Skip("needs CONFIG_TIME_NS: ", err)
	}
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), unshare, "--time", "--monotonic", "86400", "--fork", self, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), "EBPFLLM_TEST_TIME_NAMESPACE=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.Contains(t, string(out), "--- PASS")
}
