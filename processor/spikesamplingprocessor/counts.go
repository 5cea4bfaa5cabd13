package spikesamplingprocessor

import (
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.uber.org/zap"
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
	*c = newCounts()

	t.ProcessorSpikeSamplingBufferUsage.Record(ctx, int64(p.buffer.bytes))
	t.ProcessorSpikeSamplingTracesBuffered.Record(ctx, int64(len(p.buffer.traces)))
	t.ProcessorSpikeSamplingClustersOpen.Record(ctx, int64(p.open))
	own, warming, evicted := p.baseline.Stats()
	for state, n := range map[string]int64{"own": int64(own), "warming": int64(warming), "evicted": evicted} {
		t.ProcessorSpikeSamplingBaselineSeries.Record(ctx, n, with(attribute.String("state", state)))
	}
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
