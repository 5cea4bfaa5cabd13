package spikesamplingprocessor

import (
	"fmt"
	"math"
	"strings"
	"time"

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
// matches. It is known before the trace's randomness is looked at, so that the
// adjusted counts of what is kept add up. limited tells that the rate or the
// cluster's bound made it stricter.
func (p *policy) chance(top *spike, now int64) (threshold sampling.Threshold, limited bool) {
	threshold = p.threshold
	stricter := func(left, of float64) {
		if t := thin(left, of); sampling.ThresholdGreater(t, threshold) {
			threshold, limited = t, true
		}
	}
	if p.kind == Spike && p.maxCluster > 0 && top.point.cluster != nil {
		stricter(float64(p.maxCluster-top.point.cluster.kept), float64(p.maxCluster))
	}
	if p.rate != nil {
		stricter(p.rate.left(now), p.rate.size)
	}
	return threshold, limited
}

// thinFrom is the part of a bound that is given away outright, and thinBits the
// power of two by which the last of the rest stands for.
const (
	thinFrom = 0.75
	thinBits = 16
)

// thin returns the threshold by which to keep a trace when so many of a bound
// are left: the first three quarters are kept all, then ever fewer, by powers of
// two down to one in 65,536, and none when nothing is left. A bound of n is used
// up after about 1,500·n traces: the sum of 2^(16·4·k/n) over the n/4 of the
// last quarter.
func thin(left, of float64) sampling.Threshold {
	if left < 1 {
		return sampling.NeverSampleThreshold
	}
	share := left / (of * (1 - thinFrom))
	if share >= 1 {
		return sampling.AlwaysSampleThreshold
	}
	bits := min(thinBits, int(math.Ceil(thinBits*(1-share))))
	t, err := sampling.UnsignedToThreshold(sampling.MaxAdjustedCount - sampling.MaxAdjustedCount>>bits)
	if err != nil {
		return sampling.NeverSampleThreshold // cannot be: bits is small
	}
	return t
}

// minBurst is the least number of traces that a rate lets through at once.
const minBurst = 10

// rate is a token bucket.
type rate struct {
	perSecond float64
	size      float64
	tokens    float64
	at        int64 // ns since the epoch, 0 before the first use
}

func newRate(perSecond float64) *rate {
	size := max(perSecond, minBurst)
	return &rate{perSecond: perSecond, size: size, tokens: size}
}

// left returns what the bucket holds now.
func (r *rate) left(now int64) float64 {
	if r.at > 0 && now > r.at {
		r.tokens = min(r.size, r.tokens+time.Duration(now-r.at).Seconds()*r.perSecond)
	}
	r.at = now
	return r.tokens
}

// decision is what a kept trace carries, now and when late spans come.
type decision struct {
	keep      bool
	policy    *policy // nil if none matched
	threshold sampling.Threshold
	guessed   bool // by a rule that had seen only part of the trace: with which probability it is kept is not known
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
		t, lim := pol.chance(top, now)
		if lim {
			limited = append(limited, pol.name)
		}
		if sampling.ThresholdLessThan(t, threshold) {
			best, threshold = pol, t
		}
	}
	if best == nil || !threshold.ShouldSample(rnd) {
		for _, name := range limited {
			p.count.limited[name]++
		}
		return decision{policy: dropped}
	}
	if best.rate != nil {
		best.rate.tokens--
	}
	return decision{
		keep: true, policy: best, threshold: threshold,
		guessed: (early || tr.reopened) && best.kind != Probabilistic,
	}
}

// statusBit returns the bit of a status code, 0 for one that there is not.
func statusBit(c ptrace.StatusCode) uint8 {
	if c < 0 || c > 7 {
		return 0
	}
	return 1 << c
}
