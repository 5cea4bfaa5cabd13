package spikesamplingprocessor

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/confmap/confmaptest"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// What the recipes of examples/tail-sampling keep of the same traffic.
func TestTheRecipesKeepWhatTheySay(t *testing.T) {
	const (
		plain, spiked, failed, health, wanted, late = 1, 2, 3, 4, 5, 6
	)
	for recipe, keeps := range map[string][]uint64{
		"only-spikes":            {spiked},
		"spikes-errors-baseline": {spiked, failed, wanted},
		"chat-ttft":              {spiked, late},
		"two-tier-sampler":       {spiked, failed},
		"config":                 {spiked}, // beside tail_sampling
	} {
		t.Run(recipe, func(t *testing.T) {
			conf, err := confmaptest.LoadConf(filepath.Join("..", "..", "examples", "tail-sampling", recipe+".yaml"))
			require.NoError(t, err)
			conf, err = conf.Sub("processors::spike_sampling")
			require.NoError(t, err)
			h := newHarnessOn(t, func(c *Config) { require.NoError(t, conf.Unmarshal(c)) }, newHost(t, t.TempDir()))
			// None of it is in the sample of all, whose share is at most 1 %.
			const out = "ot=rv:00000000000000"
			warm := func() {
				for i := range uint64(200) {
					at := h.clock.Sub(epoch)
					s := request(2, 1, at-100*time.Millisecond, at, map[string]float64{"stage.lock": 0})
					s.state = out
					h.send(makeTraces(1_000_000+i, kernel("llm", s)))
					h.pass(tickInterval)
				}
				h.pass(10 * time.Second)
			}
			warm()
			before := len(h.kept())
			send := func(id uint64, change func(*span), lock float64) {
				at := h.clock.Sub(epoch)
				s := request(id<<8, id<<8|1, at-time.Second, at, map[string]float64{"stage.lock": lock})
				s.state = out
				if change != nil {
					change(&s)
				}
				h.send(makeTraces(id, kernel("llm", s)))
			}
			send(plain, nil, 0)
			send(spiked, nil, 0.5)
			send(failed, func(s *span) { s.status = ptrace.StatusCodeError }, 0)
			send(health, func(s *span) { s.attrs["url.path"] = "/health"; s.status = ptrace.StatusCodeError }, 0.5)
			send(wanted, func(s *span) { s.attrs["must_keep"] = true; s.attrs["url.path"] = "/health" }, 0)
			send(late, func(s *span) { s.attrs["ebpfllm.response.time_to_first_chunk"] = 2.4 }, 0)
			h.pass(40 * time.Second)
			want := map[uint64]bool{}
			for _, id := range keeps {
				want[id] = true
			}
			if recipe != "spikes-errors-baseline" {
				want[health] = true // a spike as any other
			}
			kept := h.kept()
			for id := uint64(plain); id <= late; id++ {
				assert.Equal(t, want[id], len(kept[traceID(id)]) > 0, "trace %d", id)
			}
			assert.Zero(t, before, "none of the usual traffic")
		})
	}
}
