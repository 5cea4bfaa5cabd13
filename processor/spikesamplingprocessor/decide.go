package spikesamplingprocessor

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/sampling"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// noPolicy stands for the policy of a trace that none matched.
const noPolicy = "none"

// Why a trace was decided before it was complete.
const (
	earlyBufferFull  = "buffer_full"
	earlyTooLarge    = "trace_too_large"
	earlyMaxDuration = "max_trace_duration"
	earlyShutdown    = "shutdown"
)

// policy is a compiled PolicyConfig.
type policy struct {
	name       string
	kind       PolicyType
	keepLone   bool
	maxCluster int // traces kept per cluster, 0 for no bound
	statuses   uint8
	threshold  sampling.Threshold
	reason     string // spike.reason of a trace without a spike
}

func newPolicies(cfgs []PolicyConfig) ([]policy, error) {
	var ps []policy
	for _, c := range cfgs {
		p := policy{name: c.Name, kind: c.Type, threshold: sampling.AlwaysSampleThreshold}
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
		}
		ps = append(ps, p)
	}
	return ps, nil
}

// matches tells whether the policy keeps the trace, whose top spike is given if
// it has one.
func (p *policy) matches(tr *trace, top *spike, rnd sampling.Randomness) bool {
	switch p.kind {
	case Spike:
		if top == nil {
			return false
		}
		cl := top.point.cluster
		if cl == nil {
			return p.keepLone
		}
		return p.maxCluster == 0 || cl.kept < p.maxCluster
	case StatusCode:
		return tr.statuses&p.statuses != 0
	default:
		return p.threshold.ShouldSample(rnd)
	}
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

// keptTrace is a trace on its way out.
type keptTrace struct {
	decision
	records []record
	bytes   int          // charged to the buffer until it is sent
	late    bool         // spans that came after their trace's decision
	top     *spike       // nil if nothing stood out
	cluster *clusterMark // nil for a lone spike
}

// clusterMark is what a kept trace says of its cluster, as known at its decision.
type clusterMark struct {
	id, incident string
	start, end   int64 // ns since the epoch
	size         int   // spikes
}

// decide takes the trace out of the buffer and decides about it, once.
func (p *spikeSampling) decide(tr *trace, early string, now int64) {
	p.buffer.remove(tr)
	measured := tr.measured()
	for service := range measured {
		p.operations.measure(service, now)
	}
	top := choose(spikesOf(tr, measured))
	p.settle(tr)

	rnd := sampling.TraceIDToRandomness(tr.id)
	if tr.rv != 0 {
		if r, err := sampling.UnsignedToRandomness(tr.rv - 1); err == nil {
			rnd = r
		}
	}
	var d decision
	for i := range p.policies {
		pol := &p.policies[i]
		if tr.reopened && pol.kind != Spike {
			continue // it had its say when the trace was dropped
		}
		// The first of the least strict ones counts.
		if pol.matches(tr, top, rnd) && (d.policy == nil || sampling.ThresholdLessThan(pol.threshold, d.threshold)) {
			d = decision{keep: true, policy: pol, threshold: pol.threshold, guessed: (early != "" || tr.reopened) && pol.kind != Probabilistic}
		}
	}

	p.count.decide(tr, d, early)
	if !tr.reopened {
		p.telemetry.ProcessorSpikeSamplingDecisionAge.Record(p.ctx, time.Duration(now-tr.first).Seconds())
	}
	if d.keep {
		p.sampled.put(tr.id, d)
	} else {
		p.dropped.put(tr.id, struct{}{})
	}
	if !d.keep && !p.cfg.DryRun {
		p.buffer.free(tr.records, tr.bytes)
		return
	}
	k := &keptTrace{decision: d, records: tr.records, bytes: tr.bytes, top: top}
	if top != nil && top.point.cluster != nil {
		cl := top.point.cluster
		cl.kept++
		k.cluster = &clusterMark{id: cl.id, incident: cl.incident.id, start: cl.start, end: cl.end, size: cl.size}
	}
	p.enqueue(k)
}

// spikesOf returns the trace's spikes without those in the duration of an
// application span whose process the receiver measured: there the stages say
// what is to be said.
func spikesOf(tr *trace, measured map[string]bool) []*spike {
	out := func(s *spike) bool { return s.kind == spanSeries && measured[s.service] }
	if !slices.ContainsFunc(tr.spikes, out) {
		return tr.spikes
	}
	return slices.DeleteFunc(slices.Clone(tr.spikes), out)
}

// check looks at a trace that is due and decides it or sets a new time. stepped
// says that clustering is up to date.
func (p *spikeSampling) check(tr *trace, now int64, stepped bool) {
	limit := tr.first + p.cfg.MaxTraceDuration.Nanoseconds()
	early := ""
	if now >= limit {
		early = earlyMaxDuration
	} else {
		due := tr.last + p.cfg.DecisionWait.Nanoseconds()
		switch r := tr.look(p.operations); {
		case r.open:
			due = limit
		case r.awaited:
		case r.root:
			due = min(due, tr.rootAt+tr.rootWait(p.cfg.DecisionWaitAfterRootReceived.Nanoseconds()))
		}
		if due > now {
			p.buffer.setDue(tr, min(due, limit))
			return
		}
	}
	// A spike waits for its neighbours, and for the step that finds them; a trace
	// with ever new ones does not wait for ever.
	for _, s := range tr.spikes {
		if hold := min(s.holdUntil, limit+p.cfg.Clustering.ClusterWait.Nanoseconds()); hold > now {
			p.buffer.setDue(tr, hold)
			return
		}
	}
	if len(tr.spikes) > 0 && !stepped {
		p.buffer.setDue(tr, p.nextStep)
		return
	}
	p.decide(tr, early, now)
}

// statusBit returns the bit of a status code, 0 for one that there is not.
func statusBit(c ptrace.StatusCode) uint8 {
	if c < 0 || c > 7 {
		return 0
	}
	return 1 << c
}
