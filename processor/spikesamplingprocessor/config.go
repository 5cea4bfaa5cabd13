package spikesamplingprocessor

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/sampling"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.uber.org/zap"

	"github.com/ebpfllm/ebpfllm/internal/dbscan"
)

// Config configures the processor. Names are those of the tail_sampling
// processor where they mean the same.
type Config struct {
	// DecisionWait is how long after a trace's last span it is decided if no
	// local root has come.
	DecisionWait time.Duration `mapstructure:"decision_wait"`
	// DecisionWaitAfterRootReceived is how long after its last local root a
	// trace is decided; at most 0.8s where that root is the receiver's own span.
	DecisionWaitAfterRootReceived time.Duration `mapstructure:"decision_wait_after_root_received"`
	// MaxTraceDuration bounds how long after its first span a trace is decided,
	// whatever comes in.
	MaxTraceDuration time.Duration `mapstructure:"max_trace_duration"`
	// MaxBufferMiB bounds the memory of undecided traces, in MiB.
	MaxBufferMiB int `mapstructure:"max_buffer_mib"`
	// MaxAttributeBytes is the length above which attributes' values are cut; the
	// span says so. 0 cuts nothing.
	MaxAttributeBytes int `mapstructure:"max_attribute_bytes"`

	DecisionCache DecisionCacheConfig `mapstructure:"decision_cache"`
	Baseline      BaselineConfig      `mapstructure:"baseline"`
	Clustering    ClusteringConfig    `mapstructure:"clustering"`
	// Policies say what is kept: a trace that any of them matches.
	Policies []PolicyConfig `mapstructure:"policies"`
	// Storage is the id of a storage extension, such as file_storage: the baseline
	// and kept traces outlive the process there.
	Storage *component.ID `mapstructure:"storage"`
	// DryRun keeps every trace and says on it what would have been decided.
	DryRun bool `mapstructure:"dry_run"`

	// prevent unkeyed literal initialization
	_ struct{}
}

// DecisionCacheConfig bounds the memory of past decisions, in traces. Late spans
// follow it.
type DecisionCacheConfig struct {
	SampledCacheSize    int `mapstructure:"sampled_cache_size"`
	NonSampledCacheSize int `mapstructure:"non_sampled_cache_size"`
	// prevent unkeyed literal initialization
	_ struct{}
}

// BaselineConfig sets what stands out: a value above
// max(factor·quantile, median + 6·MAD, median + min_excess) of its series.
type BaselineConfig struct {
	Quantile float64       `mapstructure:"quantile"`
	Factor   float64       `mapstructure:"factor"`
	Window   time.Duration `mapstructure:"window"`
	// MinSamples is the number of values below which a series has no opinion.
	MinSamples int           `mapstructure:"min_samples"`
	MinExcess  time.Duration `mapstructure:"min_excess"`
	// FallbackThreshold is used while neither a series nor its service's has an
	// opinion.
	FallbackThreshold time.Duration `mapstructure:"fallback_threshold"`
	// MaxSeries bounds the memory of the baseline, about 15 kB a series.
	MaxSeries int `mapstructure:"max_series"`
	// prevent unkeyed literal initialization
	_ struct{}
}

// ClusteringConfig sets when spikes belong together.
type ClusteringConfig struct {
	Window time.Duration `mapstructure:"window"`
	Stride time.Duration `mapstructure:"stride"`
	// Axes are what spikes are compared by.
	Axes []AxisConfig `mapstructure:"axes"`
	// Eps is how near neighbours are, in units of the axes' scales.
	Eps        float64 `mapstructure:"eps"`
	MinSamples int     `mapstructure:"min_samples"`
	// PoissonBound raises MinSamples to what lone spikes do not reach by accident.
	PoissonBound bool `mapstructure:"poisson_bound"`
	// ClusterWait is how long a spike is held so that its neighbours can come.
	ClusterWait time.Duration `mapstructure:"cluster_wait"`
	// prevent unkeyed literal initialization
	_ struct{}
}

// AxisConfig is one axis of clustering.
type AxisConfig struct {
	// Name is time, ratio, latency, stage or hops.
	Name string `mapstructure:"name"`
	// Scale is the difference that counts as 1: in seconds for time, powers of
	// two for ratio, milliseconds for latency, numbers for stage and hops.
	Scale float64 `mapstructure:"scale"`
	// prevent unkeyed literal initialization
	_ struct{}
}

// PolicyType is the kind of a policy.
type PolicyType string

// The policies there are.
const (
	Spike         PolicyType = "spike"          // the trace holds a spike
	StatusCode    PolicyType = "status_code"    // a span has one of the status codes
	Probabilistic PolicyType = "probabilistic"  // a share of all traces
	OTTLCondition PolicyType = "ottl_condition" // a span meets a condition
	MustKeep      PolicyType = "must_keep"      // a span or its resource asks for it
	Drop          PolicyType = "drop"           // a span meets a condition: then the trace is not kept
)

// PolicyConfig is one policy. Only the block of its type may be set.
type PolicyConfig struct {
	Name          string               `mapstructure:"name"`
	Type          PolicyType           `mapstructure:"type"`
	Spike         *SpikeConfig         `mapstructure:"spike"`
	StatusCode    *StatusCodeConfig    `mapstructure:"status_code"`
	Probabilistic *ProbabilisticConfig `mapstructure:"probabilistic"`
	OTTLCondition *OTTLConfig          `mapstructure:"ottl_condition"`
	MustKeep      *MustKeepConfig      `mapstructure:"must_keep"`
	Drop          *OTTLConfig          `mapstructure:"drop"`
	// MaxTracesPerSecond bounds what the policy keeps on average, 0.001 to 1e9; 0
	// is no bound. What it keeps says how many it stands for.
	MaxTracesPerSecond float64 `mapstructure:"max_traces_per_second"`
	// prevent unkeyed literal initialization
	_ struct{}
}

// SpikeConfig configures a spike policy.
type SpikeConfig struct {
	// KeepLone keeps spikes that belong to no cluster too.
	KeepLone bool `mapstructure:"keep_lone"`
	// MaxTracesPerCluster bounds what is kept of one cluster on average, at least
	// 3; 0 is no bound.
	MaxTracesPerCluster int `mapstructure:"max_traces_per_cluster"`
	// prevent unkeyed literal initialization
	_ struct{}
}

// Unmarshal sets the defaults of a block that is there but leaves them out.
func (c *SpikeConfig) Unmarshal(conf *confmap.Conf) error {
	*c = defaultSpike()
	return conf.Unmarshal(c)
}

func defaultSpike() SpikeConfig {
	return SpikeConfig{KeepLone: true, MaxTracesPerCluster: 1000}
}

// StatusCodeConfig configures a status_code policy.
type StatusCodeConfig struct {
	// StatusCodes are OK, ERROR or UNSET.
	StatusCodes []string `mapstructure:"status_codes"`
	// prevent unkeyed literal initialization
	_ struct{}
}

// ProbabilisticConfig configures a probabilistic policy.
type ProbabilisticConfig struct {
	// SamplingPercentage is above 0 and at most 100.
	SamplingPercentage float64 `mapstructure:"sampling_percentage"`
	// prevent unkeyed literal initialization
	_ struct{}
}

// OTTLConfig configures an ottl_condition or a drop policy: the trace matches if
// one of the conditions holds for one of its spans or events.
type OTTLConfig struct {
	// Span are OTTL conditions on a span, its resource and its scope.
	Span []string `mapstructure:"span"`
	// SpanEvent are OTTL conditions on an event of a span.
	SpanEvent []string `mapstructure:"spanevent"`
	// prevent unkeyed literal initialization
	_ struct{}
}

// MustKeepConfig configures a must_keep policy.
type MustKeepConfig struct {
	// Attribute is the name of an attribute of a span or a resource.
	Attribute string `mapstructure:"attribute"`
	// Values are those that ask for it; without any, true and what is not 0.
	Values []string `mapstructure:"values"`
	// prevent unkeyed literal initialization
	_ struct{}
}

// Unmarshal sets the defaults of a block that is there but leaves them out.
func (c *MustKeepConfig) Unmarshal(conf *confmap.Conf) error {
	*c = defaultMustKeep()
	return conf.Unmarshal(c)
}

func defaultMustKeep() MustKeepConfig { return MustKeepConfig{Attribute: "must_keep"} }

// ottl returns the policy's OTTL conditions, nil if it has none.
func (p *PolicyConfig) ottl() *OTTLConfig {
	if p.Type == Drop {
		return p.Drop
	}
	return p.OTTLCondition
}

func defaultConfig() *Config {
	spike := defaultSpike()
	return &Config{
		DecisionWait:                  30 * time.Second,
		DecisionWaitAfterRootReceived: 6 * time.Second,
		MaxTraceDuration:              15 * time.Minute,
		MaxBufferMiB:                  512,
		DecisionCache:                 DecisionCacheConfig{SampledCacheSize: 100_000, NonSampledCacheSize: 1_000_000},
		Baseline: BaselineConfig{
			Quantile: 0.99, Factor: 2, Window: 30 * time.Minute, MinSamples: 100,
			MinExcess: 5 * time.Millisecond, FallbackThreshold: time.Second, MaxSeries: 10_000,
		},
		Clustering: ClusteringConfig{
			Window: time.Minute, Stride: time.Second,
			Axes: []AxisConfig{{Name: axisTime, Scale: 1}, {Name: axisRatio, Scale: 2}},
			Eps:  0.8, MinSamples: 5, PoissonBound: true, ClusterWait: 2 * time.Second,
		},
		Policies: []PolicyConfig{{Name: "spikes", Type: Spike, Spike: &spike}},
	}
}

// Validate tells what is wrong with the configuration, all of it at once, each
// with the key and what to do.
func (c *Config) Validate() error {
	var errs []error
	bad := func(ok bool, key string, value any, remedy string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s is %v: %s", key, value, remedy))
		}
	}
	positive := func(key string, d time.Duration) {
		bad(d > 0, key, d, "set a duration above 0, such as 30s")
	}
	positive("decision_wait", c.DecisionWait)
	positive("decision_wait_after_root_received", c.DecisionWaitAfterRootReceived)
	bad(c.DecisionWaitAfterRootReceived <= c.DecisionWait, "decision_wait_after_root_received", c.DecisionWaitAfterRootReceived,
		fmt.Sprintf("set at most decision_wait (%v)", c.DecisionWait))
	bad(c.MaxTraceDuration >= c.DecisionWait, "max_trace_duration", c.MaxTraceDuration,
		fmt.Sprintf("set at least decision_wait (%v)", c.DecisionWait))
	bad(c.MaxTraceDuration <= maxWait, "max_trace_duration", c.MaxTraceDuration, fmt.Sprintf("set at most %v", maxWait))
	bad(c.MaxBufferMiB >= 1 && c.MaxBufferMiB <= 1<<20, "max_buffer_mib", c.MaxBufferMiB, "set 1 to 1048576")
	bad(c.MaxAttributeBytes == 0 || c.MaxAttributeBytes >= minAttributeBytes && c.MaxAttributeBytes <= 1<<30, "max_attribute_bytes", c.MaxAttributeBytes,
		fmt.Sprintf("set 0 (nothing is cut) or %d to 1073741824: shorter values are names that policies and root causes go by", minAttributeBytes))
	cached := func(key string, n int) {
		bad(n >= 0 && n <= maxCached, key, n, fmt.Sprintf("set 0 (late spans start a new trace) to %d", maxCached))
	}
	cached("decision_cache::sampled_cache_size", c.DecisionCache.SampledCacheSize)
	cached("decision_cache::non_sampled_cache_size", c.DecisionCache.NonSampledCacheSize)

	b := c.Baseline
	bad(b.Quantile > 0 && b.Quantile < 1, "baseline::quantile", b.Quantile, "set a number between 0 and 1, such as 0.99")
	bad(b.Factor >= 1 && !math.IsInf(b.Factor, 1), "baseline::factor", b.Factor, "set 1 or more")
	bad(b.Window >= time.Minute && b.Window <= maxWait, "baseline::window", b.Window, fmt.Sprintf("set at least 1m, at most %v", maxWait))
	bad(b.MinSamples >= 2 && b.MinSamples <= maxBaselineSamples, "baseline::min_samples", b.MinSamples,
		fmt.Sprintf("set at least 2, at most %d, or no series ever has an opinion", maxBaselineSamples))
	bad(b.MinExcess >= 0, "baseline::min_excess", b.MinExcess, "set 0 or more")
	positive("baseline::fallback_threshold", b.FallbackThreshold)
	bad(b.MaxSeries >= 100, "baseline::max_series", b.MaxSeries, "set at least 100: one operation has up to 40 series, its parent's included")
	bad(b.MaxSeries <= maxSeries, "baseline::max_series", b.MaxSeries, fmt.Sprintf("set at most %d: each takes up to 15 kB", maxSeries))

	cl := c.Clustering
	bad(cl.Stride >= tickInterval, "clustering::stride", cl.Stride, fmt.Sprintf("set a duration of at least %v, such as 1s: time is looked at so often", tickInterval))
	bad(cl.Stride <= cl.Window, "clustering::stride", cl.Stride, fmt.Sprintf("set at most clustering::window (%v)", cl.Window))
	bad(cl.Window <= time.Hour, "clustering::window", cl.Window, "set at most 1h")
	bad(cl.Eps >= minEps && cl.Eps <= farAway, "clustering::eps", cl.Eps, fmt.Sprintf("set a number of at least %g and at most %d, such as 0.8", minEps, farAway))
	errs = append(errs, cl.validateAxes())
	bad(cl.MinSamples >= 2, "clustering::min_samples", cl.MinSamples, "set at least 2; lone spikes are kept by the spike policy's keep_lone")
	bad(cl.MinSamples <= maxPartition, "clustering::min_samples", cl.MinSamples, fmt.Sprintf("set at most %d: so many spikes are clustered at once", maxPartition))
	if need := clusterWaitFor(cl); cl.Eps >= minEps && cl.Eps <= farAway {
		bad(cl.ClusterWait >= need, "clustering::cluster_wait", cl.ClusterWait,
			fmt.Sprintf("set at least %v (eps in time plus a stride), or a spike is decided before its neighbours can come", need))
		bad(cl.ClusterWait <= cl.Window/2, "clustering::cluster_wait", cl.ClusterWait, fmt.Sprintf("set at most half of clustering::window (%v)", cl.Window/2))
	}

	if len(c.Policies) == 0 {
		errs = append(errs, errors.New("policies is empty: nothing would be kept; leave it out for the default, or list at least one policy"))
	}
	if n := len(c.Policies); n > 0 && !slices.ContainsFunc(c.Policies, func(p PolicyConfig) bool { return p.Type != Drop }) {
		errs = append(errs, errors.New("policies has drop policies only: nothing would be kept; add one that keeps, such as {name: spikes, type: spike}"))
	}
	if len(c.Policies) > maxPolicies {
		errs = append(errs, fmt.Errorf("policies has %d policies: list at most %d; one ottl_condition may list several conditions", len(c.Policies), maxPolicies))
	}
	names := map[string]bool{}
	for i := range c.Policies {
		p := &c.Policies[i]
		if err := p.validate(); err != nil {
			errs = append(errs, fmt.Errorf("policies[%d] (%q): %w", i, p.Name, err))
		}
		if names[p.Name] {
			errs = append(errs, fmt.Errorf("policies[%d]: name %q is used twice: give each policy a name of its own", i, p.Name))
		}
		names[p.Name] = true
	}
	return errors.Join(errs...)
}

// clusterWaitFor returns the least cluster_wait: all points within eps must have
// had a stride's time to arrive. The clustering step comes right before the
// decision, so no further stride is lost.
func clusterWaitFor(c ClusteringConfig) time.Duration {
	return c.timeReach() + c.Stride
}

func (c *ClusteringConfig) validateAxes() error {
	var errs []error
	if n := len(c.Axes); n < 1 || n > dbscan.MaxDims {
		errs = append(errs, fmt.Errorf("clustering::axes has %d axes: list 1 to %d, or leave it out for time and ratio", n, dbscan.MaxDims))
	}
	names := map[string]bool{}
	for i, x := range c.Axes {
		switch x.Name {
		case axisTime, axisRatio, axisLatency, axisStage, axisHops:
		default:
			errs = append(errs, fmt.Errorf("clustering::axes[%d]::name is %q: use time, ratio, latency, stage or hops", i, x.Name))
		}
		if names[x.Name] {
			errs = append(errs, fmt.Errorf("clustering::axes[%d]::name is %q for the second time: list each axis once", i, x.Name))
		}
		names[x.Name] = true
		if !(x.Scale >= minScale && x.Scale <= maxScale) { // NaN too
			errs = append(errs, fmt.Errorf("clustering::axes[%d]::scale (%s) is %v: set what counts as 1, between %g and %g", i, x.Name, x.Scale, minScale, maxScale))
		}
	}
	switch n := len(c.Axes); {
	case names[axisTime]:
	case n == dbscan.MaxDims:
		errs = append(errs, fmt.Errorf("clustering::axes has %d axes without time: list at most %d", n, dbscan.MaxDims-1))
	case c.PoissonBound:
		errs = append(errs, errors.New("clustering::poisson_bound is true without an axis time: set it to false, or add the axis; the background is known as a rate"))
	}
	return errors.Join(errs...)
}

// Bounds above which a number is a mistake: what it asks for cannot be had.
const (
	maxWait            = 7 * 24 * time.Hour
	maxCached          = 100_000_000 // some 6 GB
	maxBaselineSamples = 1_000_000   // in a window
	maxSeries          = 1_000_000   // some 15 GB
)

// minEps is the least eps: nearer than any two spikes that are not the same.
const minEps = 1e-9

// minPercentage is the least probability that a tracestate can tell, 2^-56.
const minPercentage = 100 * sampling.MinSamplingProbability

// minAttributeBytes is the least length of values that may be cut.
const minAttributeBytes = 256

// maxPolicies is the number of bits in which a trace remembers what conditions its
// spans met.
const maxPolicies = 64

// The range of a scale: no coordinate overflows.
const (
	minScale = 1e-6
	maxScale = 1e9
)

// The range of a rate, in traces a second. The least looks back over three hours.
const (
	minPerSecond = 0.001
	maxPerSecond = 1e9
)

func (p *PolicyConfig) validate() error {
	var errs []error
	if p.Name == "" || p.Name == noPolicy {
		errs = append(errs, fmt.Errorf("name is %q: set a name; kept traces carry it as spike.policy", p.Name))
	}
	for _, b := range []struct {
		t   PolicyType
		set bool
	}{
		{Spike, p.Spike != nil},
		{StatusCode, p.StatusCode != nil},
		{Probabilistic, p.Probabilistic != nil},
		{OTTLCondition, p.OTTLCondition != nil},
		{MustKeep, p.MustKeep != nil},
		{Drop, p.Drop != nil},
	} {
		if b.set && b.t != p.Type {
			errs = append(errs, fmt.Errorf("type is %q but a block %s is set: remove the block or change the type", p.Type, b.t))
		}
	}
	if r := p.MaxTracesPerSecond; r != 0 && !(r >= minPerSecond && r <= maxPerSecond) { // NaN too
		errs = append(errs, fmt.Errorf("max_traces_per_second is %v: set 0 (no bound), or %v to %.0f", r, minPerSecond, maxPerSecond))
	} else if r > 0 && p.Type == Drop {
		errs = append(errs, errors.New("max_traces_per_second is set: a drop policy keeps nothing; remove it"))
	}
	switch p.Type {
	case OTTLCondition, Drop:
		o := p.ottl()
		if o == nil || len(o.Span)+len(o.SpanEvent) == 0 {
			errs = append(errs, fmt.Errorf("%s has no condition: list some under span or spanevent", p.Type))
			break
		}
		if _, err := ottlCondition(*o, component.TelemetrySettings{Logger: zap.NewNop()}); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", p.Type, err))
		}
	case MustKeep:
		if p.MustKeep != nil && p.MustKeep.Attribute == "" {
			errs = append(errs, errors.New("must_keep::attribute is empty: name an attribute, or leave it out for must_keep"))
		}
	case Spike:
		if p.Spike != nil && p.Spike.MaxTracesPerCluster != 0 && p.Spike.MaxTracesPerCluster < minClusterBound {
			errs = append(errs, fmt.Errorf("spike::max_traces_per_cluster is %d: set 0 (no bound) or at least %d, of which one is kept outright and the others tell how many more there were",
				p.Spike.MaxTracesPerCluster, minClusterBound))
		}
	case StatusCode:
		if p.StatusCode == nil || len(p.StatusCode.StatusCodes) == 0 {
			errs = append(errs, errors.New("status_code::status_codes is empty: list one or more of OK, ERROR, UNSET"))
			break
		}
		for _, name := range p.StatusCode.StatusCodes {
			if _, ok := statusCodes[name]; !ok {
				errs = append(errs, fmt.Errorf("status_code::status_codes has %q: use OK, ERROR or UNSET", name))
			}
		}
	case Probabilistic:
		if p.Probabilistic == nil {
			errs = append(errs, errors.New("probabilistic::sampling_percentage is missing: set a number above 0 and at most 100"))
		} else if s := p.Probabilistic.SamplingPercentage; !(s >= minPercentage && s <= 100) { // NaN too
			errs = append(errs, fmt.Errorf("probabilistic::sampling_percentage is %v: set a number above 0 and at most 100, no less than %v", s, minPercentage))
		}
	default:
		errs = append(errs, fmt.Errorf("type is %q: use spike, status_code, ottl_condition, probabilistic, must_keep or drop", p.Type))
	}
	return errors.Join(errs...)
}

var statusCodes = map[string]ptrace.StatusCode{
	"OK": ptrace.StatusCodeOk, "ERROR": ptrace.StatusCodeError, "UNSET": ptrace.StatusCodeUnset,
}
