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

// tally sums up what kept traces stand for.
type tally struct{ came, kept, sum, variance float64 }

// ask lets the policies decide about one more trace.
func (y *tally) ask(t *testing.T, p *spikeSampling, tr *trace, top *spike, rng *rand.Rand, now int64) bool {
	t.Helper()
	rnd, err := sampling.UnsignedToRandomness(rng.Uint64N(1 << 56))
	require.NoError(t, err)
	y.came++
	d := p.apply(tr, top, rnd, false, now)
	if d.keep {
		w := d.threshold.AdjustedCount()
		y.kept++
		y.sum += w
		y.variance += w * (w - 1)
	}
	return d.keep
}

// Whatever comes, what a rate keeps adds up to it, from the first trace on and
// when all has settled, and it is about as much as is allowed.
func TestARateIsUnbiasedFromNextToNothingToAStorm(t *testing.T) {
	for _, bound := range []float64{1, 2, 5, 10, 20, 50, 100} {
		for _, perSecond := range []int{10, 100, 1000, 10_000} {
			t.Run(fmt.Sprintf("%v of %d", bound, perSecond), func(t *testing.T) {
				const warm, measured = 30, 40 // seconds
				limited := keepErrs
				limited.MaxTracesPerSecond = bound
				cfg := defaultConfig()
				cfg.Policies = []PolicyConfig{limited}
				var whole, settled tally
				for seed := range uint64(2) {
					p := newTestProcessor(t, cfg, nil)
					rng := rand.New(rand.NewPCG(seed, uint64(perSecond)))
					tr := &trace{statuses: statusBit(ptrace.StatusCodeError)}
					for i := range (warm + measured) * perSecond {
						// As ticks bring them: all of a tenth of a second at once.
						now := epoch.Add(time.Duration(i/(perSecond/10)) * tickInterval).UnixNano()
						y := &whole
						if i >= warm*perSecond {
							y = &settled
						}
						y.ask(t, p, tr, nil, rng, now)
					}
				}
				whole.sum, whole.came, whole.variance = whole.sum+settled.sum, whole.came+settled.came, whole.variance+settled.variance
				t.Logf("settled: %.0f of %.0f kept, sum of counts / truth %.3f; in all %.3f", settled.kept, settled.came, settled.sum/settled.came, whole.sum/whole.came)
				for name, y := range map[string]tally{"settled": settled, "in all": whole} {
					sigma := math.Sqrt(y.variance)
					assert.InDelta(t, y.came, y.sum, 4*sigma+1e-9, name)
					assert.Less(t, sigma, y.came/5, "%s: the test could not fail", name)
				}
				allowed := 2 * measured * min(bound, float64(perSecond))
				assert.InDelta(t, allowed, settled.kept, 5*math.Sqrt(allowed)+allowed/20)
			})
		}
	}
}

// A cluster's bound, however small, goes on telling how large the cluster is, and
// what it keeps stays below the bound on average.
func TestAClustersBoundIsUnbiasedHoweverSmall(t *testing.T) {
	for _, bound := range []int{3, 4, 5, 8, 10, 20, 100, 1000} {
		for _, size := range []int{3, 30, 300, 10_000} {
			t.Run(fmt.Sprintf("%d of %d", bound, size), func(t *testing.T) {
				const runs = 2000
				cfg := defaultConfig()
				cfg.Policies[0].Spike.MaxTracesPerCluster = bound
				require.NoError(t, cfg.Validate())
				p := newTestProcessor(t, cfg, nil)
				rng := rand.New(rand.NewPCG(uint64(bound), uint64(size)))
				var y tally
				n := runs * 30 / max(30, min(size, 1500))
				for range n {
					cl := &cluster{}
					top := &spike{point: &point{cluster: cl}}
					for range size {
						if y.ask(t, p, &trace{}, top, rng, 0) {
							cl.kept++
						}
						cl.traces++
					}
				}
				// The weights are steep: their true spread, not that of those seen, says
				// how far the sum may be off.
				variance := 0.0
				for i := range size {
					variance += float64(n) * (1/shareOfCluster(i+1, bound) - 1)
				}
				t.Logf("%.2f of %d kept, sum of counts / truth %.3f", y.kept/float64(n), size, y.sum/y.came)
				assert.InDelta(t, y.came, y.sum, 4*math.Sqrt(variance)+1e-9)
				assert.LessOrEqual(t, y.kept/float64(n), float64(bound)+4*math.Sqrt(float64(bound)/float64(n)))
				assert.GreaterOrEqual(t, y.kept, float64(n), "the first is always kept")
			})
		}
	}
}
