package spikesamplingprocessor

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/sampling"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// Behind a sampler, bounds hold of what came in, each trace stands for as many of
// those as it does, and the tracestate still for what there was before.
func TestBehindASamplerTracesStandForThoseThatCameIn(t *testing.T) {
	limited := keepErrs
	limited.MaxTracesPerSecond = 20
	percent := func(v float64) PolicyConfig {
		return PolicyConfig{Name: "base", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: v}}
	}
	const n = 40_000
	for _, tt := range []struct {
		name     string
		upstream float64
		policy   PolicyConfig
		kept     float64 // about
	}{
		{"stricter than this one", 0.01, percent(10), 0.01 * n},
		{"looser than this one", 0.10, percent(1), 0.01 * n},
		{"none", 1, percent(1), 0.01 * n},
		{"before a rate", 0.10, limited, 400},
	} {
		t.Run(tt.name, func(t *testing.T) {
			th, err := sampling.ProbabilityToThreshold(tt.upstream)
			require.NoError(t, err)
			h := newHarness(t, policies(tt.policy))
			rng := rand.New(rand.NewPCG(3, 4))
			came := 0.0
			for i := range uint64(n) {
				r := rng.Uint64N(1 << 56)
				if r >= th.Unsigned() {
					came++
					state := fmt.Sprintf("ot=rv:%014x", r)
					if tt.upstream < 1 {
						state += ";th:" + th.TValue()
					}
					h.send(makeTraces(1+i, app("a", span{id: 2, kind: server, to: 1, status: ptrace.StatusCodeError, state: state})))
				}
				if i%200 == 0 { // 20 s
					h.pass(tickInterval)
				}
			}
			h.pass(10 * time.Second)
			var here, origin tally
			for _, spans := range h.kept() {
				v, ok := spans[0].Attributes().Get(attrStandsFor)
				require.True(t, ok)
				w, o := v.Double(), adjusted(t, spans[0])
				here.kept++
				here.sum += w
				here.variance += w * (w - 1)
				origin.sum += o
				origin.variance += o * (o - 1)
			}
			t.Logf("%.0f came, %.0f kept, stand for %.0f of those and %.0f before the sampler", came, here.kept, here.sum, origin.sum)
			assert.InDelta(t, came, here.sum, 4*math.Sqrt(here.variance)+1e-6)
			assert.InDelta(t, n, origin.sum, 4*math.Sqrt(origin.variance))
			assert.InDelta(t, tt.kept, here.kept, tt.kept/3)
		})
	}
}
