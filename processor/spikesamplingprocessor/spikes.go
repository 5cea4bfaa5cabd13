package spikesamplingprocessor

import (
	"fmt"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"

	"github.com/ebpfllm/ebpfllm/internal/baseline"
)

// spike is a value of a trace that stands out from its baseline.
type spike struct {
	kind      *seriesKind
	span      pcommon.SpanID // the kernel.request, or the application span
	service   string
	operation string
	seconds   float64
	verdict   baseline.Verdict
	point     *point
	holdUntil int64 // its neighbours have come then
	learn     bool  // the value may be learned when the trace is decided
}

// excess returns the seconds above the baseline.
func (s *spike) excess() float64 {
	if s.verdict.State == baseline.Fallback {
		return s.seconds - s.verdict.Threshold
	}
	return s.seconds - s.verdict.Baseline
}

// reason says in words what stood out.
func (s *spike) reason() string {
	what := s.kind.stage.String()
	switch {
	case s.kind == spanSeries:
		what = fmt.Sprintf("span %q", s.operation)
	case s.kind.socket:
		what += " (socket total)"
	}
	took := fmt.Sprintf("%s took %s", what, seconds(s.seconds))
	if s.verdict.State == baseline.Fallback {
		return fmt.Sprintf("%s, above the fallback threshold of %s", took, seconds(s.verdict.Threshold))
	}
	return fmt.Sprintf("%s, %s above its baseline of %s", took, seconds(s.excess()), seconds(s.verdict.Baseline))
}

func seconds(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(10 * time.Microsecond).String()
}

// comparableShare is the share of the largest excess that a stage of better rank must
// explain to be preferred.
const comparableShare = 0.5

// choose returns the spike to be named as the trace's: of the best rank whose
// largest excess is at least half of the largest of all.
//
// Among application spans the shortest with a comparable excess is chosen: the
// innermost, since an outer span is slow because an inner one is.
func choose(spikes []*spike) *spike {
	var best [ranks]*spike
	var top *spike
	for _, s := range spikes {
		if b := &best[s.kind.rank]; *b == nil || s.excess() > (*b).excess() {
			*b = s
		}
		if top == nil || s.excess() > top.excess() {
			top = s
		}
	}
	for _, b := range best {
		if b == nil || b.excess() < comparableShare*top.excess() {
			continue
		}
		if b.kind == spanSeries {
			return innermost(spikes, comparableShare*b.excess())
		}
		return b
	}
	return top // nil without spikes
}

func innermost(spikes []*spike, excess float64) *spike {
	var in *spike
	for _, s := range spikes {
		if s.kind == spanSeries && s.excess() >= excess && (in == nil || s.seconds < in.seconds) {
			in = s
		}
	}
	return in
}

// maxSpikes bounds the spikes remembered per trace; a giant trace has had its
// say by then.
const maxSpikes = 256

// observe judges an item's values, learns those that do not stand out and puts
// those that do into the trace and the clustering. It runs after all spans of a
// batch are in the buffer, so that a request finds its occurrences.
func (p *spikeSampling) observe(tr *trace, it *item, now int64) {
	service := it.scope.resource.service
	if it.kernel != nil || it.role&roleRoot != 0 && !it.scope.kernel && !p.operations.measures(service) {
		if d := it.duration(); d >= 0 && !p.tails.Add(service, d) {
			p.count.untracked++
		}
	}
	if it.kernel != nil {
		name := p.operations.name(operationKey{service: service, name: it.kernel.operation, kernel: true}, now)
		group := p.baseline.Group(service, name)
		for _, m := range it.kernel.values {
			at := it.end
			if end, ok := tr.stallEnd(it.id, m.series.stage); ok {
				at = end
			}
			p.judge(series(group, m.series), tr, spike{
				kind: m.series, span: it.id, service: service, operation: name,
				seconds: m.seconds, learn: !it.kernel.incomplete,
			}, at, now)
		}
		return
	}
	if d := it.duration(); d >= 0 && !it.scope.kernel {
		name := p.operations.name(operationKey{service: service, name: it.name, kind: it.kind}, now)
		p.judge(series(p.baseline.Group(service, name), spanSeries), tr, spike{
			kind: spanSeries, span: it.id, service: service, operation: name, seconds: d, learn: true,
		}, it.end, now)
	}
}

// series returns the series of a kind. A delay means the same in all operations
// of a service; how long they compute, wait and take does not.
func series(g *baseline.Group, k *seriesKind) *baseline.Series {
	return g.Series(k.name, k.rank < rankLeftOver)
}

// judge learns s or, if it stands out, makes it a spike of the trace that ended
// at the given time by the wall clock.
func (p *spikeSampling) judge(sr *baseline.Series, tr *trace, s spike, ended, now int64) {
	// A fixed threshold makes sense for a delay and for a whole span, not for
	// what is left over: a stream waits for its engine all its life.
	s.verdict = sr.Judge(s.seconds, s.kind.rank != rankLeftOver)
	if !s.verdict.Exceeds || len(tr.spikes) >= maxSpikes {
		if s.learn {
			sr.Learn(s.seconds)
		}
		return
	}
	at := p.onClock(ended)
	if at > now || at < now-p.cfg.Clustering.Window.Nanoseconds() {
		at = now // a skewed clock, or too late to be a neighbour: go by arrival
	}
	base := max(s.verdict.Baseline, p.cfg.Baseline.MinExcess.Seconds(), minRatioBase)
	f := features{at: at, ratio: s.seconds / base, seconds: s.seconds, stage: s.kind.stage}
	if p.cfg.Clustering.has(axisHops) {
		f.hops = tr.services()
	}
	s.point = p.clusters.add(p.clusters.partitionOf(s.service, s.operation, s.kind), f)
	s.holdUntil = now + p.cfg.Clustering.ClusterWait.Nanoseconds()
	held := s // s itself stays off the heap: most values are no spikes
	tr.spikes = append(tr.spikes, &held)
	p.buffer.charge(tr, spikeOverhead)
}

// maxHopSpans bounds the spans looked at for their services.
const maxHopSpans = 1000

// services is the number of services that the trace's first spans are of, at
// least 1.
func (tr *trace) services() int {
	names := map[string]bool{}
	for i := range tr.records[:min(len(tr.records), maxHopSpans)] {
		names[tr.records[i].scope.resource.service] = true
	}
	return max(1, len(names))
}

// minRatioBase keeps the ratio finite where the baseline and min_excess are
// zero, in seconds.
const minRatioBase = 1e-3

// settle tells the baseline what became of the spikes of a decided trace.
func (p *spikeSampling) settle(tr *trace) {
	for _, s := range tr.spikes {
		p.clusters.settle(s.point)
		if !s.learn {
			continue
		}
		sr := series(p.baseline.Group(s.service, s.operation), s.kind)
		if s.point.cluster != nil {
			sr.Exclude(s.seconds)
		} else {
			sr.Defer(s.seconds)
		}
	}
}
