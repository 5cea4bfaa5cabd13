package spikesamplingprocessor

import (
	"slices"
	"time"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/sampling"
	"go.opentelemetry.io/collector/pdata/pcommon"
)

// Why a trace was decided before it was complete.
const (
	earlyBufferFull  = "buffer_full"
	earlyTooLarge    = "trace_too_large"
	earlyMaxDuration = "max_trace_duration"
	earlyShutdown    = "shutdown"
)

// keptTrace is a decided trace: as a rule one on its way out.
type keptTrace struct {
	decision
	id      pcommon.TraceID
	records []record
	bytes   int          // charged to the buffer until it is sent
	late    bool         // spans that came after their trace's decision
	written bool         // it is in the storage
	top     *spike       // nil if nothing stood out
	cluster *clusterMark // nil for a lone spike
}

// clusterMark is what a kept trace says of its cluster, as known at its decision.
type clusterMark struct {
	id, incident string
	start, end   int64 // ns since the epoch, on a kept trace by the wall clock
	size         int   // spikes
	traces       int   // decided, kept or not
}

// decide takes the trace out of the buffer and decides about it, once.
func (p *spikeSampling) decide(tr *trace, early string, now int64) {
	k := p.conclude(tr, early, now)
	if k.keep {
		p.sampled.put(tr.id, k.decision)
	} else {
		p.dropped.put(tr.id, k.policy != nil)
	}
	if !k.keep && !p.cfg.DryRun {
		p.buffer.free(tr.records, tr.bytes)
		return
	}
	kept := k // most are dropped: only what is kept goes to the heap
	p.enqueue(&kept)
}

// conclude takes the trace out of the buffer and judges it. Its bytes stay
// charged.
func (p *spikeSampling) conclude(tr *trace, early string, now int64) keptTrace {
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
	d := p.apply(tr, top, rnd, early != "", now)
	p.count.decide(tr, d, early)
	if !tr.reopened {
		p.telemetry.ProcessorSpikeSamplingDecisionAge.Record(p.ctx, time.Duration(now-tr.first).Seconds())
	}
	var cl *cluster
	if top != nil {
		cl = top.point.cluster
	}
	if cl != nil {
		cl.traces++
	}
	if d.keep && cl != nil {
		cl.kept++
	}
	k := keptTrace{id: tr.id, decision: d, records: tr.records, bytes: tr.bytes, top: top}
	if cl != nil {
		mark := cl.mark
		mark.start, mark.end, mark.traces = p.onWall(mark.start), p.onWall(mark.end), cl.traces
		k.cluster = &mark
	}
	return k
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
