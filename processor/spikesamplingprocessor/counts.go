package spikesamplingprocessor

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.uber.org/zap"

	"github.com/ebpfllm/ebpfllm/internal/baseline"
)

// Why spans are lost other than by a decision.
const (
	dropNoTraceID  = "missing_trace_id"
	dropNoSpanID   = "missing_span_id"
	dropDuplicate  = "duplicate"
	dropMalformed  = "malformed"
	dropRefused    = "refused"
	dropDownstream = "downstream_error"
)

// counts collects what the counters are raised by at the next report: once per
// step instead of once per span.
type counts struct {
	decided          map[decidedKey]int64
	early            map[string]int64
	dropped          map[string]int64
	limited          map[string]int64
	unweighted       int64
	truncated        int64
	lateKept         int64
	lateDropped      int64
	downstreamErrors int64
	approximate      int64
	untracked        int64
}

type decidedKey struct {
	keep   bool
	policy string
}

func newCounts() counts {
	return counts{decided: map[decidedKey]int64{}, early: map[string]int64{}, dropped: map[string]int64{}, limited: map[string]int64{}}
}

// decide counts a decision; of a trace that was decided before, its spans as
// late.
func (c *counts) decide(tr *trace, d decision, early string) {
	if tr.reopened {
		c.late(d.keep, len(tr.records))
	} else {
		c.decided[decidedKey{d.keep, d.policyName()}]++
	}
	if early != "" {
		c.early[early]++
	}
	if d.keep && d.guessed {
		c.unweighted++
	}
}

func (c *counts) drop(reason string, spans int) {
	if spans > 0 {
		c.dropped[reason] += int64(spans)
	}
}

func (c *counts) late(keep bool, spans int) {
	if keep {
		c.lateKept += int64(spans)
	} else {
		c.lateDropped += int64(spans)
	}
}

func decisionName(keep bool) string {
	if keep {
		return "sampled"
	}
	return "not_sampled"
}

// report raises the counters and sets the gauges.
func (p *spikeSampling) report() {
	ctx, t, c := p.ctx, p.telemetry, &p.count
	with := metric.WithAttributes
	for k, n := range c.decided {
		t.ProcessorSpikeSamplingTracesDecided.Add(ctx, n, with(attribute.String("decision", decisionName(k.keep)), attribute.String("policy", k.policy)))
	}
	for reason, n := range c.early {
		t.ProcessorSpikeSamplingTracesDecidedEarly.Add(ctx, n, with(attribute.String("reason", reason)))
	}
	for reason, n := range c.dropped {
		t.ProcessorSpikeSamplingSpansDropped.Add(ctx, n, with(attribute.String("reason", reason)))
	}
	for policy, n := range c.limited {
		t.ProcessorSpikeSamplingTracesLimited.Add(ctx, n, with(attribute.String("policy", policy)))
	}
	t.ProcessorSpikeSamplingTracesUnweighted.Add(ctx, c.unweighted)
	t.ProcessorSpikeSamplingAttributesTruncated.Add(ctx, c.truncated)
	for i := range p.policies {
		p.reportErrors(p.policies[i].condition)
	}
	for keep, n := range map[bool]int64{true: c.lateKept, false: c.lateDropped} {
		if n > 0 {
			t.ProcessorSpikeSamplingSpansLate.Add(ctx, n, with(attribute.String("decision", decisionName(keep))))
		}
	}
	t.ProcessorSpikeSamplingDownstreamErrors.Add(ctx, c.downstreamErrors)
	t.ProcessorSpikeSamplingApproximateSteps.Add(ctx, c.approximate)
	t.ProcessorSpikeSamplingServiceRequestsUntracked.Add(ctx, c.untracked)
	*c = newCounts()

	t.ProcessorSpikeSamplingBufferUsage.Record(ctx, int64(p.buffer.bytes))
	t.ProcessorSpikeSamplingTracesBuffered.Record(ctx, int64(len(p.buffer.traces)))
	t.ProcessorSpikeSamplingClustersOpen.Record(ctx, int64(p.open))
	own, warming, evicted := p.baseline.Stats()
	for state, n := range map[string]int64{"own": int64(own), "warming": int64(warming), "evicted": evicted} {
		t.ProcessorSpikeSamplingBaselineSeries.Record(ctx, n, with(attribute.String("state", state)))
	}
}

// observeTails lets what is known of the services' tails be read when metrics are
// collected, and nothing of those of which nothing is known any more.
func (p *spikeSampling) observeTails() error {
	observe := func(value func(baseline.TailReport) (float64, bool)) metric.Float64Callback {
		return func(_ context.Context, o metric.Float64Observer) error {
			p.mu.Lock()
			reports := p.reports // never changed, only replaced
			p.mu.Unlock()
			for _, r := range reports {
				if v, ok := value(r); ok {
					o.Observe(v, metric.WithAttributes(attribute.String("service.name", r.Service)))
				}
			}
			return nil
		}
	}
	return errors.Join(
		p.telemetry.RegisterProcessorSpikeSamplingServiceJitterRatioCallback(observe(func(r baseline.TailReport) (float64, bool) {
			if r.Jitter == nil {
				return 0, false
			}
			return *r.Jitter, true
		})),
		p.telemetry.RegisterProcessorSpikeSamplingServiceTailZCallback(observe(func(r baseline.TailReport) (float64, bool) {
			if r.Change == nil {
				return 0, false
			}
			return r.Change.Z, true
		})),
		p.telemetry.RegisterProcessorSpikeSamplingServiceTailEffectCallback(observe(func(r baseline.TailReport) (float64, bool) {
			if r.Change == nil {
				return 0, false
			}
			return r.Change.Effect, true
		})),
	)
}

// reportErrors counts and logs what kept a condition from being evaluated.
func (p *spikeSampling) reportErrors(c *condition) {
	if c == nil {
		return
	}
	n := c.errors.Swap(0)
	if n == 0 {
		return
	}
	p.telemetry.ProcessorSpikeSamplingConditionErrors.Add(p.ctx, n, metric.WithAttributes(attribute.String("policy", c.policy)))
	if now := p.now(); now.Sub(p.lastConditionError) >= errorInterval {
		p.lastConditionError = now
		p.logger.Warn("A policy's condition could not be evaluated; for these spans it does not hold. Guard it, such as with attributes[\"x\"] != nil",
			zap.String("policy", c.policy), zap.Int64("spans", n), zap.Error(*c.last.Load()))
	}
}
