package spikesamplingprocessor

import (
	"math"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap/confmaptest"

	"github.com/ebpfllm/ebpfllm/processor/spikesamplingprocessor/internal/metadata"
)

func TestLoadConfig(t *testing.T) {
	with := func(change func(*Config)) *Config {
		c := defaultConfig()
		change(c)
		return c
	}
	storage := component.MustNewIDWithName("file_storage", "spikes")
	tests := []struct {
		id   component.ID
		want *Config
	}{
		{component.NewID(metadata.Type), defaultConfig()},
		{component.NewIDWithName(metadata.Type, "all"), &Config{
			DecisionWait: 20 * time.Second, DecisionWaitAfterRootReceived: 4 * time.Second,
			MaxTraceDuration: 10 * time.Minute, MaxBufferMiB: 256,
			DecisionCache: DecisionCacheConfig{SampledCacheSize: 1000, NonSampledCacheSize: 2000},
			Baseline: BaselineConfig{
				Quantile: 0.95, Factor: 3, Window: 10 * time.Minute, MinSamples: 50,
				MinExcess: 10 * time.Millisecond, FallbackThreshold: 2 * time.Second, MaxSeries: 5000,
			},
			Clustering: ClusteringConfig{
				Window: 30 * time.Second, Stride: 500 * time.Millisecond, Axes: []AxisConfig{{Name: axisTime, Scale: 0.5}, {Name: axisStage, Scale: 2}, {Name: axisLatency, Scale: 10}},
				Eps: 0.5, MinSamples: 4, ClusterWait: 3 * time.Second,
			},
			Policies: []PolicyConfig{
				{Name: "incidents", Type: Spike, Spike: &SpikeConfig{KeepLone: false, MaxTracesPerCluster: 10}},
				{Name: "errors", Type: StatusCode, StatusCode: &StatusCodeConfig{StatusCodes: []string{"ERROR"}}},
				{Name: "sample", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: 0.5}},
				{Name: "objective", Type: OTTLCondition, MaxTracesPerSecond: 20, OTTLCondition: &OTTLConfig{
					Span: []string{`attributes["ttft"] > 2.0`}, SpanEvent: []string{`name == "exception"`},
				}},
				{Name: "asked", Type: MustKeep, MustKeep: &MustKeepConfig{Attribute: "must_keep", Values: []string{"gold"}}},
				{Name: "health", Type: Drop, Drop: &OTTLConfig{Span: []string{`attributes["url.path"] == "/health"`}}},
			},
			MaxAttributeBytes: 4096,
			Storage:           &storage,
			DryRun:            true,
		}},
		{component.NewIDWithName(metadata.Type, "short"), with(func(c *Config) {
			c.Policies = []PolicyConfig{
				{Name: "spikes", Type: Spike},
				{Name: "capped", Type: Spike, Spike: &SpikeConfig{KeepLone: true, MaxTracesPerCluster: 5}},
			}
		})},
		{component.NewIDWithName(metadata.Type, "status_only"), with(func(c *Config) {
			c.Policies = []PolicyConfig{{Name: "errors", Type: StatusCode, StatusCode: &StatusCodeConfig{StatusCodes: []string{"ERROR", "UNSET"}}}}
		})},
	}
	for _, tt := range tests {
		t.Run(tt.id.String(), func(t *testing.T) {
			cm, err := confmaptest.LoadConf(filepath.Join("testdata", "config.yaml"))
			require.NoError(t, err)
			sub, err := cm.Sub(tt.id.String())
			require.NoError(t, err)
			cfg := NewFactory().CreateDefaultConfig()
			require.NoError(t, sub.Unmarshal(cfg))
			require.NoError(t, cfg.(*Config).Validate())
			assert.Equal(t, tt.want, cfg)
		})
	}
}

// Each mistake is refused by an error that names the key, the value and what to
// do about it.
func TestValidateNamesTheKeyAndTheRemedy(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Config)
		want   string
	}{
		{"negative wait", func(c *Config) { c.DecisionWait = -time.Second }, "decision_wait is -1s: set a duration above 0"},
		{"no root wait", func(c *Config) { c.DecisionWaitAfterRootReceived = 0 }, "decision_wait_after_root_received is 0s: set a duration above 0"},
		{"root wait above the other", func(c *Config) { c.DecisionWaitAfterRootReceived = time.Minute }, "decision_wait_after_root_received is 1m0s: set at most decision_wait (30s)"},
		{"traces shorter than the wait", func(c *Config) { c.MaxTraceDuration = time.Second }, "max_trace_duration is 1s: set at least decision_wait (30s)"},
		{"no buffer", func(c *Config) { c.MaxBufferMiB = 0 }, "max_buffer_mib is 0: set 1 to 1048576"},
		{"absurd buffer", func(c *Config) { c.MaxBufferMiB = 1 << 40 }, "max_buffer_mib is 1099511627776: set 1 to"},
		{"names cut", func(c *Config) { c.MaxAttributeBytes = 10 }, "max_attribute_bytes is 10: set 0 (nothing is cut) or 256"},
		{"negative cache", func(c *Config) { c.DecisionCache.SampledCacheSize = -1 }, "decision_cache::sampled_cache_size is -1: set 0"},
		{"negative drop cache", func(c *Config) { c.DecisionCache.NonSampledCacheSize = -1 }, "decision_cache::non_sampled_cache_size is -1: set 0"},
		{"quantile as a percentage", func(c *Config) { c.Baseline.Quantile = 99 }, "baseline::quantile is 99: set a number between 0 and 1, such as 0.99"},
		{"factor below one", func(c *Config) { c.Baseline.Factor = 0.5 }, "baseline::factor is 0.5: set 1 or more"},
		{"short baseline", func(c *Config) { c.Baseline.Window = time.Second }, "baseline::window is 1s: set at least 1m"},
		{"one sample", func(c *Config) { c.Baseline.MinSamples = 1 }, "baseline::min_samples is 1: set at least 2"},
		{"negative excess", func(c *Config) { c.Baseline.MinExcess = -1 }, "baseline::min_excess is -1ns: set 0 or more"},
		{"no fallback", func(c *Config) { c.Baseline.FallbackThreshold = 0 }, "baseline::fallback_threshold is 0s: set a duration above 0"},
		{"few series", func(c *Config) { c.Baseline.MaxSeries = 10 }, "baseline::max_series is 10: set at least 100"},
		{"no stride", func(c *Config) { c.Clustering.Stride = 0 }, "clustering::stride is 0s: set a duration of at least 100ms"},
		{"stride over the window", func(c *Config) { c.Clustering.Stride = time.Hour }, "clustering::stride is 1h0m0s: set at most clustering::window (1m0s)"},
		{"long window", func(c *Config) { c.Clustering.Window = 2 * time.Hour }, "clustering::window is 2h0m0s: set at most 1h"},
		{"no eps", func(c *Config) { c.Clustering.Eps = 0 }, "clustering::eps is 0: set a number of at least 1e-09"},
		{"no axes", func(c *Config) { c.Clustering.Axes = []AxisConfig{} }, "clustering::axes has 0 axes: list 1 to 4"},
		{"unknown axis", func(c *Config) { c.Clustering.Axes[1].Name = "size" }, `clustering::axes[1]::name is "size": use time, ratio`},
		{"an axis twice", func(c *Config) { c.Clustering.Axes[1].Name = "time" }, `clustering::axes[1]::name is "time" for the second time`},
		{"zero scale", func(c *Config) { c.Clustering.Axes[1].Scale = 0 }, "clustering::axes[1]::scale (ratio) is 0: set what counts as 1"},
		{"scale that is no number", func(c *Config) { c.Clustering.Axes[0].Scale = math.NaN() }, "clustering::axes[0]::scale (time) is NaN"},
		{"infinite scale", func(c *Config) { c.Clustering.Axes[0].Scale = math.Inf(1) }, "clustering::axes[0]::scale (time) is +Inf"},
		{"a rate without time", func(c *Config) { c.Clustering.Axes = c.Clustering.Axes[1:] }, "clustering::poisson_bound is true without an axis time: set it to false"},
		{"clusters of one", func(c *Config) { c.Clustering.MinSamples = 1 }, "clustering::min_samples is 1: set at least 2; lone spikes are kept by"},
		{"impatient", func(c *Config) { c.Clustering.ClusterWait = time.Second }, "clustering::cluster_wait is 1s: set at least 1.8s"},
		{"too patient", func(c *Config) { c.Clustering.ClusterWait = time.Minute }, "clustering::cluster_wait is 1m0s: set at most half of clustering::window (30s)"},
		{"no policies", func(c *Config) { c.Policies = []PolicyConfig{} }, "policies is empty: nothing would be kept"},
		{"nameless", func(c *Config) { c.Policies[0].Name = "" }, `policies[0] (""): name is "": set a name`},
		{"reserved name", func(c *Config) { c.Policies[0].Name = "none" }, `name is "none": set a name`},
		{"twice the same name", func(c *Config) { c.Policies = append(c.Policies, c.Policies[0]) }, `policies[1]: name "spikes" is used twice`},
		{"unknown type", func(c *Config) { c.Policies[0] = PolicyConfig{Name: "x", Type: "latency"} }, `type is "latency": use spike, status_code, ottl_condition, probabilistic, must_keep or drop`},
		{"foreign block", func(c *Config) { c.Policies[0].Probabilistic = &ProbabilisticConfig{SamplingPercentage: 1} }, `type is "spike" but a block probabilistic is set: remove the block`},
		{"negative cap", func(c *Config) { c.Policies[0].Spike.MaxTracesPerCluster = -1 }, "spike::max_traces_per_cluster is -1: set 0"},
		{"a cap too small to tell more", func(c *Config) { c.Policies[0].Spike.MaxTracesPerCluster = 2 }, "spike::max_traces_per_cluster is 2: set 0 (no bound) or at least 3"},
		{"no codes", func(c *Config) { c.Policies[0] = PolicyConfig{Name: "x", Type: StatusCode} }, "status_code::status_codes is empty: list one or more of OK"},
		{"unknown code", func(c *Config) {
			c.Policies[0] = PolicyConfig{Name: "x", Type: StatusCode, StatusCode: &StatusCodeConfig{StatusCodes: []string{"error"}}}
		}, `status_code::status_codes has "error": use OK, ERROR or UNSET`},
		{"a condition that is none", func(c *Config) {
			c.Policies[0] = PolicyConfig{Name: "x", Type: OTTLCondition, OTTLCondition: &OTTLConfig{Span: []string{"attributes[\"x\"] >"}}}
		}, "ottl_condition: "},
		{"no condition", func(c *Config) { c.Policies[0] = PolicyConfig{Name: "x", Type: OTTLCondition} }, "ottl_condition has no condition: list some under span or spanevent"},
		{"a drop without a condition", func(c *Config) {
			c.Policies = append(c.Policies, PolicyConfig{Name: "x", Type: Drop, Drop: &OTTLConfig{}})
		}, "drop has no condition"},
		{"drop alone", func(c *Config) {
			c.Policies[0] = PolicyConfig{Name: "x", Type: Drop, Drop: &OTTLConfig{Span: []string{"true"}}}
		}, "policies has drop policies only: nothing would be kept"},
		{"a rate on drop", func(c *Config) {
			c.Policies = append(c.Policies, PolicyConfig{Name: "x", Type: Drop, Drop: &OTTLConfig{Span: []string{"true"}}, MaxTracesPerSecond: 1})
		}, "max_traces_per_second is set: a drop policy keeps nothing"},
		{"a negative rate", func(c *Config) { c.Policies[0].MaxTracesPerSecond = -1 }, "max_traces_per_second is -1: set 0"},
		{"a rate that is no number", func(c *Config) { c.Policies[0].MaxTracesPerSecond = math.NaN() }, "max_traces_per_second is NaN"},
		{"next to no rate", func(c *Config) { c.Policies[0].MaxTracesPerSecond = 1e-9 }, "max_traces_per_second is 1e-09: set 0 (no bound), or 0.001 to 1000000000"},
		{"no attribute", func(c *Config) { c.Policies[0] = PolicyConfig{Name: "x", Type: MustKeep, MustKeep: &MustKeepConfig{}} }, "must_keep::attribute is empty"},
		{"too many policies", func(c *Config) {
			for i := range maxPolicies {
				c.Policies = append(c.Policies, PolicyConfig{Name: strconv.Itoa(i), Type: Spike})
			}
		}, "policies has 65 policies: list at most 64"},
		{"no percentage", func(c *Config) { c.Policies[0] = PolicyConfig{Name: "x", Type: Probabilistic} }, "probabilistic::sampling_percentage is missing"},
		{"all percent and more", func(c *Config) {
			c.Policies[0] = PolicyConfig{Name: "x", Type: Probabilistic, Probabilistic: &ProbabilisticConfig{SamplingPercentage: 101}}
		}, "probabilistic::sampling_percentage is 101: set a number above 0 and at most 100"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := defaultConfig()
			tt.change(c)
			assert.ErrorContains(t, c.Validate(), tt.want)
		})
	}
}

func TestValidateReportsAllMistakesAtOnce(t *testing.T) {
	c := defaultConfig()
	c.MaxBufferMiB, c.Baseline.Quantile = 0, 0
	err := c.Validate()
	require.ErrorContains(t, err, "max_buffer_mib")
	require.ErrorContains(t, err, "baseline::quantile")
}
