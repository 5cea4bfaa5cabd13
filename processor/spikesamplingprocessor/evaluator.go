package spikesamplingprocessor

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/sampling"
	"github.com/open-telemetry/opentelemetry-collector-contrib/processor/tailsamplingprocessor/pkg/samplingpolicy"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/processor"
)

// EvaluatorConfig configures a spike policy that runs inside contrib's
// tail_sampling. Its fields are those of this processor.
type EvaluatorConfig struct {
	MaxTracesPerCluster int              `mapstructure:"max_traces_per_cluster"`
	MaxTracesPerSecond  float64          `mapstructure:"max_traces_per_second"`
	Baseline            BaselineConfig   `mapstructure:"baseline"`
	Clustering          ClusteringConfig `mapstructure:"clustering"`
	// prevent unkeyed literal initialization
	_ struct{}
}

// DefaultEvaluatorConfig returns the defaults, which are the processor's.
func DefaultEvaluatorConfig() EvaluatorConfig {
	c := defaultConfig()
	return EvaluatorConfig{
		MaxTracesPerCluster: defaultSpike().MaxTracesPerCluster,
		Baseline:            c.Baseline, Clustering: c.Clustering,
	}
}

// Evaluator is the spike policy inside contrib's tail_sampling, which buffers,
// asks about each trace once, and must be answered at once: a spike cannot be
// held until its neighbours have come. So lone spikes are always kept, and a
// cluster is named from its first step on.
type Evaluator struct {
	mu sync.Mutex // serializes Evaluate
	p  *spikeSampling
}

var _ samplingpolicy.ThresholdEvaluator = (*Evaluator)(nil)

// NewEvaluator returns a spike policy with a baseline of its own.
func NewEvaluator(policyName string, set component.TelemetrySettings, cfg EvaluatorConfig) (*Evaluator, error) {
	c := defaultConfig()
	c.MaxBufferMiB = 1 << 20 // it holds one trace at a time
	c.DecisionCache = DecisionCacheConfig{}
	c.Baseline, c.Clustering = cfg.Baseline, cfg.Clustering
	c.Policies = []PolicyConfig{{
		Name: policyName, Type: Spike, MaxTracesPerSecond: cfg.MaxTracesPerSecond,
		Spike: &SpikeConfig{KeepLone: true, MaxTracesPerCluster: cfg.MaxTracesPerCluster},
	}}
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("policy %q: %w", policyName, err)
	}
	p, err := newProcessor(processor.Settings{TelemetrySettings: set}, c, nil)
	if err != nil {
		return nil, err
	}
	p.begin(context.Background())
	return &Evaluator{p: p}, nil
}

// IsStateful implements samplingpolicy.Evaluator: it learns from each trace.
func (*Evaluator) IsStateful() bool { return true }

// Evaluate implements samplingpolicy.Evaluator.
func (e *Evaluator) Evaluate(ctx context.Context, id pcommon.TraceID, data *samplingpolicy.TraceData) (samplingpolicy.Decision, error) {
	d, _, err := e.EvaluateWithThreshold(ctx, id, data)
	return d, err
}

// EvaluateWithThreshold implements samplingpolicy.ThresholdEvaluator. A trace that
// it wants kept gets the attributes that say why.
func (e *Evaluator) EvaluateWithThreshold(_ context.Context, id pcommon.TraceID, data *samplingpolicy.TraceData) (samplingpolicy.Decision, sampling.Threshold, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.p
	copied := ptrace.NewTraces()
	data.ReceivedBatches.CopyTo(copied)
	p.mu.Lock()
	now := p.clock()
	stepped := now >= p.nextStep
	p.mu.Unlock()
	if stepped {
		p.step(now)
	}
	d := p.digests.Get().(*digest)
	defer func() { d.reset(); p.digests.Put(d) }()
	d.take(copied)

	p.mu.Lock()
	defer p.mu.Unlock()
	if stepped {
		p.report()
	}
	if err := p.absorb(d); err != nil {
		return samplingpolicy.Error, sampling.NeverSampleThreshold, err
	}
	tr, ok := p.buffer.traces[id]
	if !ok {
		return samplingpolicy.Error, sampling.NeverSampleThreshold, errors.New("spike policy: the trace has no span with ids")
	}
	k := p.conclude(tr, "", now)
	defer p.buffer.free(k.records, k.bytes)
	if !k.keep {
		return samplingpolicy.NotSampled, sampling.NeverSampleThreshold, nil
	}
	p.annotate(&k, nodesOf(data.ReceivedBatches, tr))
	return samplingpolicy.Sampled, k.threshold, nil
}

// nodesOf returns the trace's spans where they are, each with its record.
func nodesOf(td ptrace.Traces, tr *trace) []node {
	var nodes []node
	for _, rs := range td.ResourceSpans().All() {
		for _, ss := range rs.ScopeSpans().All() {
			for _, span := range ss.Spans().All() {
				if i, ok := tr.find(span.SpanID()); ok {
					nodes = append(nodes, node{Span: span, record: &tr.records[i]})
				}
			}
		}
	}
	return nodes
}

// Shutdown reports what is left to report.
func (e *Evaluator) Shutdown() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.p.mu.Lock()
	defer e.p.mu.Unlock()
	e.p.report()
	e.p.cancel()
	e.p.telemetry.Shutdown()
}
