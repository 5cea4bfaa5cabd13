package spikesamplingprocessor

import (
	"fmt"
	"math"
	"strings"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/sampling"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// noPolicy stands for the policy of a trace that none matched.
const noPolicy = "none"

// policy is a compiled PolicyConfig.
type policy struct {
	name       string
	kind       PolicyType
	keepLone   bool
	maxCluster int // traces kept per cluster, 0 for no bound
	statuses   uint8
	condition  *condition // of policies that look at single spans
	threshold  sampling.Threshold
	rate       *rate  // nil for no bound
	reason     string // spike.reason of a trace without a spike
}

func newPolicies(cfgs []PolicyConfig, set component.TelemetrySettings) ([]policy, error) {
	var ps []policy
	for i, c := range cfgs {
		p := policy{name: c.Name, kind: c.Type, threshold: sampling.AlwaysSampleThreshold}
		look := func(match func(ptrace.ResourceSpans, ptrace.ScopeSpans, ptrace.Span) (bool, error)) {
			p.condition = &condition{bit: 1 << i, policy: c.Name, match: match}
		}
		switch c.Type {
		case Spike:
			spike := defaultSpike()
			if c.Spike != nil {
				spike = *c.Spike
			}
			p.keepLone, p.maxCluster = spike.KeepLone, spike.MaxTracesPerCluster
		case StatusCode:
			for _, name := range c.StatusCode.StatusCodes {
				p.statuses |= 1 << statusCodes[name]
			}
			p.reason = "a span has status " + strings.Join(c.StatusCode.StatusCodes, " or ")
		case Probabilistic:
			t, err := sampling.ProbabilityToThreshold(c.Probabilistic.SamplingPercentage / 100)
			if err != nil {
				return nil, fmt.Errorf("policy %q: sampling_percentage %v: %w", c.Name, c.Probabilistic.SamplingPercentage, err)
			}
			p.threshold = t
			p.reason = fmt.Sprintf("a sample of %v %% of all traces", c.Probabilistic.SamplingPercentage)
		case MustKeep:
			keep := defaultMustKeep()
			if c.MustKeep != nil {
				keep = *c.MustKeep
			}
			look(attributeCondition(keep))
			p.reason = fmt.Sprintf("attribute %s asks for it", keep.Attribute)
		case OTTLCondition, Drop:
			match, err := ottlCondition(*c.ottl(), set)
			if err != nil {
				return nil, fmt.Errorf("policy %q: %w", c.Name, err)
			}
			look(match)
			p.reason = "condition of policy " + c.Name
		}
		if c.MaxTracesPerSecond > 0 {
			p.rate = newRate(c.MaxTracesPerSecond)
		}
		ps = append(ps, p)
	}
	return ps, nil
}

// conditionsOf returns what is to be asked of each span.
func conditionsOf(policies []policy) []*condition {
	var cs []*condition
	for i := range policies {
		if c := policies[i].condition; c != nil {
			cs = append(cs, c)
		}
	}
	return cs
}

// matches tells whether the trace, whose top spike is given if it has one, is
// one that the policy is about.
func (p *policy) matches(tr *trace, top *spike) bool {
	switch p.kind {
	case Spike:
		return top != nil && (p.keepLone || top.point.cluster != nil)
	case StatusCode:
		return tr.statuses&p.statuses != 0
	case Probabilistic:
		return true
	default:
		return tr.matched&p.condition.bit != 0
	}
}

// chance returns the threshold by which the policy keeps a trace that it
// matches. It is known before the trace's randomness is looked at, and does not
// depend on what was kept before, so the adjusted counts of what is kept add up.
// limited tells that the rate or the cluster's bound made it stricter.
func (p *policy) chance(tr *trace, top *spike, now int64) (threshold sampling.Threshold, limited bool) {
	share := 1.0
	if p.kind == Spike && p.maxCluster > 0 && top.point.cluster != nil {
		share = shareOfCluster(top.point.cluster.traces+1, p.maxCluster)
	}
	if p.rate != nil {
		share = min(share, p.rate.share(now))
	}
	if t := thresholdFor(share, tr.before()); sampling.ThresholdGreater(t, p.threshold) {
		return t, true
	}
	return p.threshold, false
}

// thresholdPrecision is the number of significant hexadecimal digits of a
// bound's threshold, as the tracestate carries it.
const thresholdPrecision = 4

// thresholdFor returns the threshold that keeps a share, above 0, of the traces
// that a sampler before this one let through by the given threshold.
func thresholdFor(share float64, before sampling.Threshold) sampling.Threshold {
	if share >= 1 {
		return sampling.AlwaysSampleThreshold
	}
	probability := max(share*before.Probability(), sampling.MinSamplingProbability)
	t, err := sampling.ProbabilityToThresholdWithPrecision(probability, thresholdPrecision)
	if err != nil {
		return sampling.NeverSampleThreshold // cannot be: the probability is within its range
	}
	return t
}

// minClusterBound is the least bound of a cluster: one trace is kept outright,
// and what may be kept besides tells how many more there were.
const minClusterBound = 3

// shareOfCluster returns the share that is kept of a cluster's nth trace, counted
// from 1: all of a third of the bound, then (bound/3/n)^1.5. So no trace is ever
// out of the question, and what is kept of a cluster, however large, comes to the
// bound on average: with c for bound/3, c + the sum of (c/n)^1.5 over n > c is
// less than c + 2c.
func shareOfCluster(n, bound int) float64 {
	whole := float64(bound) / 3
	if float64(n) <= whole {
		return 1
	}
	return math.Pow(whole/float64(n), 1.5)
}

// A rate looks back over a second, or over the time in which so many traces are
// allowed if that is longer: fewer are too few to know the traffic by.
const minAllowed = 10

// rateSlots is the number of parts in which the traces of that time are counted.
const rateSlots = 10

// rate bounds a policy by the traffic that it has: of the traces of the last
// while, the next one included, it keeps the share that is allowed.
type rate struct {
	allowed float64 // traces, in the time that is looked back over
	slot    int64   // ns
	at      int64   // the slot that counts now, since the epoch
	traces  [rateSlots + 1]int
	total   int // of traces
}

func newRate(perSecond float64) *rate {
	seconds := max(1, minAllowed/perSecond)
	return &rate{allowed: perSecond * seconds, slot: int64(seconds / rateSlots * 1e9)}
}

// share returns the share that is kept of the next trace. It is never 0, and is
// less than 1 only when more have come than are allowed.
func (r *rate) share(now int64) float64 {
	for at := max(now/r.slot, r.at); r.at < at; {
		r.at = max(r.at+1, at-rateSlots) // nothing before that is remembered
		oldest := &r.traces[r.at%int64(len(r.traces))]
		r.total -= *oldest
		*oldest = 0
	}
	// Of the oldest slot the part that has passed out of sight does not count.
	oldest := r.traces[(r.at+1)%int64(len(r.traces))]
	passed := float64(now%r.slot) / float64(r.slot)
	return min(1, r.allowed/(float64(r.total+1)-passed*float64(oldest)))
}

// add counts a trace that was decided by share, kept or not.
func (r *rate) add() {
	r.traces[r.at%int64(len(r.traces))]++
	r.total++
}

// decision is what a kept trace carries, now and when late spans come.
type decision struct {
	keep      bool
	policy    *policy // nil if none matched
	threshold sampling.Threshold
	before    sampling.Threshold // by which a sampler before this one had let it through
	guessed   bool               // by a rule that had seen only part of the trace: with which probability it is kept is not known
}

// standsFor returns how many of the traces that came to this processor a kept one
// stands for: the inverse of the probability with which one that came was kept.
func (d *decision) standsFor() float64 {
	if !sampling.ThresholdGreater(d.threshold, d.before) {
		return 1 // what passes the stricter one passes this one too
	}
	return d.threshold.AdjustedCount() / d.before.AdjustedCount()
}

func (d *decision) policyName() string {
	if d.policy == nil {
		return noPolicy
	}
	return d.policy.name
}

// apply asks the policies about a trace that leaves the buffer, whole or early:
//
//  1. must_keep: a match is beyond the reach of drop
//  2. drop: a match leaves only must_keep
//  3. the others
//
// Of those that match the least strict counts, of equals the first: the trace is
// kept if its randomness passes that one's threshold, and was kept then with the
// probability that the threshold stands for, whatever the others say.
func (p *spikeSampling) apply(tr *trace, top *spike, rnd sampling.Randomness, early bool, now int64) decision {
	var dropped *policy
	for i := range p.policies {
		if pol := &p.policies[i]; pol.kind == Drop && pol.matches(tr, top) {
			dropped = pol
			break
		}
	}
	var best *policy
	threshold := sampling.NeverSampleThreshold
	var limited []string
	for i := range p.policies {
		pol := &p.policies[i]
		switch {
		case pol.kind == Drop, dropped != nil && pol.kind != MustKeep:
			continue
		case tr.reopened && pol.kind != Spike:
			continue // it had its say when the trace was dropped
		case !pol.matches(tr, top):
			continue
		}
		t, lim := pol.chance(tr, top, now)
		if lim {
			limited = append(limited, pol.name)
		}
		if sampling.ThresholdLessThan(t, threshold) {
			best, threshold = pol, t
		}
	}
	if best != nil && best.rate != nil {
		best.rate.add() // what another policy decides takes nothing of the rate
	}
	if best == nil || !threshold.ShouldSample(rnd) {
		for _, name := range limited {
			p.count.limited[name]++
		}
		return decision{policy: dropped}
	}
	return decision{
		keep: true, policy: best, threshold: threshold, before: tr.before(),
		guessed: (early || tr.reopened) && best.kind != Probabilistic,
	}
}

// before returns the threshold by which a sampler before this one let the trace
// through: that of the span that was the likeliest to come.
func (tr *trace) before() sampling.Threshold {
	if tr.th == 0 {
		return sampling.AlwaysSampleThreshold
	}
	t, err := sampling.UnsignedToThreshold(tr.th - 1)
	if err != nil {
		return sampling.AlwaysSampleThreshold // cannot be: it was read from a tracestate
	}
	return t
}

// statusBit returns the bit of a status code, 0 for one that there is not.
func statusBit(c ptrace.StatusCode) uint8 {
	if c < 0 || c > 7 {
		return 0
	}
	return 1 << c
}
