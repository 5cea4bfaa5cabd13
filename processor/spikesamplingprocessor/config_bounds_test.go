package spikesamplingprocessor

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What is accepted works: a value beyond what can be done is refused by its key,
// and the last one before it is not.
func TestValidateRefusesWhatCannotWork(t *testing.T) {
	percentage := func(c *Config, v float64) {
		c.Policies = []PolicyConfig{{Name: "x", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: v}}}
	}
	tests := []struct {
		name           string
		works, refused func(*Config)
		want           string
	}{
		{"eps", func(c *Config) { c.Clustering.Eps = 1e-9 }, func(c *Config) { c.Clustering.Eps = 1e-300 }, "clustering::eps is 1e-300: set a number of at least 1e-09 and at most 100"},
		{"percentage", func(c *Config) { percentage(c, math.Nextafter(100.0/(1<<56), 1)) }, func(c *Config) { percentage(c, 1e-20) }, "probabilistic::sampling_percentage is 1e-20: set a number above 0 and at most 100, no less than 1.3877"},
		{"max_trace_duration", func(c *Config) { c.MaxTraceDuration = 168 * time.Hour }, func(c *Config) { c.MaxTraceDuration = 2_500_000 * time.Hour }, "max_trace_duration is 2500000h0m0s: set at most 168h"},
		{
			"decision_wait",
			func(c *Config) { c.DecisionWait, c.MaxTraceDuration = 168*time.Hour, 168*time.Hour },
			func(c *Config) { c.DecisionWait, c.MaxTraceDuration = 2_500_000*time.Hour, 2_500_000*time.Hour },
			"max_trace_duration is 2500000h0m0s: set at most 168h",
		},
		{"baseline::window", func(c *Config) { c.Baseline.Window = 168 * time.Hour }, func(c *Config) { c.Baseline.Window = math.MaxInt64 }, "baseline::window is 2562047h47m16.854775807s: set at least 1m, at most 168h"},
		{"baseline::min_samples", func(c *Config) { c.Baseline.MinSamples = 1_000_000 }, func(c *Config) { c.Baseline.MinSamples = 9e18 }, "baseline::min_samples is 9000000000000000000: set at least 2, at most 1000000"},
		{"clustering::min_samples", func(c *Config) { c.Clustering.MinSamples = 100_000 }, func(c *Config) { c.Clustering.MinSamples = 9e18 }, "clustering::min_samples is 9000000000000000000: set at most 100000"},
		{"baseline::max_series", func(c *Config) { c.Baseline.MaxSeries = 1_000_000 }, func(c *Config) { c.Baseline.MaxSeries = 9e18 }, "baseline::max_series is 9000000000000000000: set at most 1000000"},
		{"sampled_cache_size", func(c *Config) { c.DecisionCache.SampledCacheSize = 1e8 }, func(c *Config) { c.DecisionCache.SampledCacheSize = 9e18 }, "decision_cache::sampled_cache_size is 9000000000000000000: set 0 (late spans start a new trace) to 100000000"},
		{"non_sampled_cache_size", func(c *Config) { c.DecisionCache.NonSampledCacheSize = 1e8 }, func(c *Config) { c.DecisionCache.NonSampledCacheSize = 9e18 }, "decision_cache::non_sampled_cache_size is 9000000000000000000: set 0"},
		{"stride", func(c *Config) { c.Clustering.Stride = 100 * time.Millisecond }, func(c *Config) { c.Clustering.Stride = 1 }, "clustering::stride is 1ns: set a duration of at least 100ms"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := defaultConfig()
			tt.refused(c)
			assert.ErrorContains(t, c.Validate(), tt.want)
			h := newHarness(t, tt.works) // validates, builds and starts
			h.send(makeTraces(1, kernel("llm", request(2, 1, 0, 3*time.Second, map[string]float64{"stage.lock": 2}))))
			h.pass(10 * time.Second)
			require.Empty(t, h.sum("traces_decided_early", "reason"))
			assert.Empty(t, h.p.buffer.traces, "decided")
		})
	}
}
