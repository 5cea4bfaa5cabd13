package loadtest

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/disturb"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// startRig starts the example server without telemetry.
func startRig(t *testing.T) *rig {
	t.Helper()
	c, err := cpus()
	if err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	p, err := build(t.Context(), LLMServer, dir)
	require.NoError(t, err)
	running, err := startServer(t.Context(), p, "127.0.0.1:0", c.server, dir, nil, "-uninstrumented")
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, running.process.Stop()) })
	client := newClient(running.url, true)
	t.Cleanup(client.close)
	return &rig{server: running, client: client, delay: 60 * time.Millisecond, contention: 60 * time.Millisecond}
}

// Each fault takes its time from the request it is meant for.
func TestFaultDelaysItsRequest(t *testing.T) {
	r := startRig(t)
	var latencies []time.Duration
	for range 21 {
		s, err := r.client.do(t.Context(), streamed(r.server.size), nil)
		require.NoError(t, err)
		latencies = append(latencies, s.Latency)
	}
	slices.Sort(latencies)
	r.usual = latencies[len(latencies)/2]
	for _, kind := range Kinds() {
		t.Run(kind.String(), func(t *testing.T) {
			for range 3 {
				tried, err := r.inject(t.Context(), step{request: faults[kind].request(r.server.size), fault: kind})
				require.NoError(t, err)
				struck := tried[len(tried)-1]
				after, err := r.client.do(t.Context(), streamed(r.server.size), nil)
				require.NoError(t, err)
				assert.Equal(t, kind, struck.Fault)
				assert.GreaterOrEqual(t, struck.Latency, MinStall)
				t.Logf("usual %v, struck %v (taken %v) after %d attempts, the next one %v", r.usual, struck.Latency, struck.Taken, len(tried), after.Latency)
			}
		})
	}
}

func TestEvictEmptiesThePageCache(t *testing.T) {
	r := startRig(t)
	file, err := os.Open(r.server.weights)
	require.NoError(t, err)
	defer file.Close()
	require.NoError(t, disturb.Warm(r.server.weights))
	_, err = r.client.do(t.Context(), streamed(r.server.size), nil)
	require.NoError(t, err)

	before, err := disturb.Resident(file)
	require.NoError(t, err)
	require.NoError(t, disturb.EvictMapping(r.server.process.PID(), r.server.weights))
	after, err := disturb.Resident(file)
	require.NoError(t, err)
	assert.Greater(t, before, 0.95)
	assert.Less(t, after, 0.05)
}

func TestPlanHoldsWhatWasAskedFor(t *testing.T) {
	for _, c := range []struct{ normal, spikes int }{{400, 30}, {4000, 200}, {7, 1}, {10, 0}, {0, 12}} {
		counts := map[stage.Stage]int{}
		lone := 0
		for _, s := range plan(c.normal, c.spikes, 16, Kinds()) {
			counts[s.fault]++
			if s.lone {
				lone++
			}
		}
		assert.Equal(t, c.normal, counts[stage.Unknown])
		delete(counts, stage.Unknown)
		spikes := 0
		for _, n := range counts {
			spikes += n
			assert.InDelta(t, float64(c.spikes)/float64(len(Kinds())), n, 1)
		}
		assert.Equal(t, c.spikes, spikes)
		if c.spikes >= 60 {
			assert.Positive(t, lone)
		}
	}
}
