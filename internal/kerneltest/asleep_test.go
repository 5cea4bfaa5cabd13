//go:build linux

package kerneltest

import (
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/disturb"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/process"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// A server waits for its first connection since long before the receiver came.
// That very first wake-up is measured like any other.
func TestTheFirstWakeUpOfAThreadThatSleptAlready(t *testing.T) {
	requireRoot(t)
	if runtime.NumCPU() < 2 {
		t.Skip("needs two CPUs: one to be kept busy, one for the client")
	}
	for _, shape := range []string{"thread per connection", "event loop", "goroutines"} {
		t.Run(shape, func(t *testing.T) {
			for range 5 {
				s := startShape(t, shape)
				pin(t, s.pid())
				awaitSleep(t, s.pid())
				w := observe(t, probe.Config{}, s)
				burn := disturb.PrepareBurners(0)
				burnt := make(chan error, 1)
				go func() { burnt <- burn(3 * delayMS * time.Millisecond) }()
				<-time.After(delayMS / 6 * time.Millisecond)
				s.get("/")
				require.NoError(t, <-burnt)
				r := &w.wait(1)[0]
				if int64(r.End-r.Start) < delayMS*ms {
					continue // the client was kept from its CPU as well, and asked too late
				}
				requireWhole(t, r)
				assert.Equal(t, "run_queue", top(r, stage.RunQueue).String(), describe(r))
				assert.Greater(t, float64(r.Exclusive[stage.RunQueue]), tolerance*float64(r.End-r.Start), describe(r))
				return
			}
			require.Fail(t, "the client never asked while the server's CPU was taken")
		})
	}
}

func startShape(t *testing.T, shape string) *server {
	t.Helper()
	if shape == "goroutines" {
		return startGo(t)
	}
	return startC(t, shape == "event loop")
}

// awaitSleep returns when all threads of the process sleep.
func awaitSleep(t *testing.T, pid uint32) {
	t.Helper()
	require.Eventually(t, func() bool {
		asleep := true
		err := process.EachThread(int(pid), func(tid int) error {
			stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(tid), "stat"))
			_, fields, _ := strings.Cut(string(stat), ") ")
			asleep = asleep && strings.HasPrefix(fields, "S")
			return err
		})
		return err == nil && asleep
	}, 5*time.Second, 10*time.Millisecond)
}
